"""The same training made of PyTorch's own parts, as its documentation and torchtitan put them together, and by Megatron Core.

Each is imported when it is asked for: DTensor, FSDP and pipelining take seconds to import.
"""

from __future__ import annotations

from benchmarks.ours import Parallax
from benchmarks.task import Contestant, Task
from parallax.mesh import Mesh

# What each name of a contestant in a comparison stands for.
DESCRIPTIONS = {
    "parallax": "Parallax with its defaults (ZeRO 1)",
    "parallax, gather at once": "Parallax with --overlap-param-gather off",
    "parallax, zero 0": "Parallax with --zero 0",
    "parallax, zero 2": "Parallax with --zero 2",
    "parallax, zero 3": "Parallax with --zero 3",
    "parallax, zb-h1": "Parallax with --schedule zb-h1",
    "parallax, zb-v": "Parallax with --schedule zb-v",
    "plain loop": "a PyTorch loop over the micro-batches",
    "DDP": "DistributedDataParallel, AdamW",
    "DDP + ZeRO": "DistributedDataParallel, ZeroRedundancyOptimizer of AdamW",
    "FSDP2": "fully_shard, gradients reduced once a step",
    "FSDP2, zero 2": "fully_shard, gradients reduced in each micro-batch, parameters gathered once a step",
    "FSDP2, zero 3": "fully_shard of each layer, gradients reduced in each micro-batch, parameters gathered for each use",
    "DTensor": "parallelize_module, loss_parallel",
    "1F1B": "torch.distributed.pipelining's Schedule1F1B",
    "ZBV": "torch.distributed.pipelining's ScheduleZBVZeroBubble",
    "DTensor + 1F1B": "Schedule1F1B over stages made by parallelize_module, loss_parallel",
    "megatron-core": "Megatron Core's GPTModel in its own schedules, 1F1B without interleaving",
}


def make_contestant(name: str, mesh: Mesh, task: Task) -> Contestant:
    """Build a contestant by its name in DESCRIPTIONS; called by every rank of the world."""
    if name == "parallax":
        return Parallax(mesh, task)
    if name == "parallax, gather at once":
        return Parallax(mesh, task, overlap_param_gather="off")
    if name.startswith("parallax, zero "):
        return Parallax(mesh, task, zero=int(name[-1]))
    if name.startswith("parallax, zb-"):
        return Parallax(mesh, task, schedule=name.removeprefix("parallax, "))
    if name == "plain loop":
        from benchmarks.peers.plain import PlainLoop

        return PlainLoop(mesh, task)
    if name in ("DDP", "DDP + ZeRO"):
        from benchmarks.peers.replicated import ReplicatedLoop

        return ReplicatedLoop(mesh, task, zero=name != "DDP")
    if name.startswith("FSDP2"):
        from benchmarks.peers.fully_sharded import FullyShardedLoop

        return FullyShardedLoop(mesh, task, zero=1 if name == "FSDP2" else int(name[-1]))
    if name == "DTensor":
        from benchmarks.peers.dtensor import DTensorLoop

        return DTensorLoop(mesh, task)
    if name == "megatron-core":
        from benchmarks.peers.megatron import MegatronLoop

        return MegatronLoop(mesh, task)
    assert name in ("1F1B", "ZBV", "DTensor + 1F1B"), name
    from benchmarks.peers.pipelining import PipelinedLoop

    return PipelinedLoop(mesh, task, zbv=name == "ZBV")
