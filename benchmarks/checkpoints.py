"""Saving and loading against the disk's own bandwidth and torch.distributed.checkpoint, in the same processes, taking turns.

    python -m benchmarks.checkpoints                        2 ranks of dp, ZeRO 1, 300 MiB of weights and optimizer states
    python -m benchmarks.checkpoints --mib 1000 --ranks 1 --folder /mnt/fast
    python -m benchmarks.checkpoints --plan                 how long thousands of ranks plan the save of a 70B model

disk: the same bytes from memory into plain files, one for each rank, and synced; read back in one go. Before each reading the
files are dropped from the page cache. Ours hashes all bytes (XXH3) on writing, and again all that a rank reads. torch's neither
syncs nor hashes, so `torch + sync` is its save and a sync of its files.
stop: how long training stands still for a save in the background. Medians over the rounds, and medians of each round's ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from benchmarks.options import at_least
from parallax.checkpoint import holdings
from parallax.checkpoint.background import BackgroundSaver
from parallax.checkpoint.load import load
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.plan import model_targets, optimizer_targets, plan_files, rounds
from parallax.checkpoint.save import make_plan, save
from parallax.collectives import barrier
from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.optimizer import ShardedAdamW
from parallax.mesh import Group, Layout, Mesh, connect
from parallax.models.config import DecoderConfig, num_parameters
from parallax.models.stages import build_stages, shape_stages
from parallax.tensor_parallel.facts import named_parameters_with_facts


def model_of(mib: int) -> DecoderConfig:
    """Return a model whose weights and moments, fp32, have about `mib` MiB."""
    hidden = 512
    per_layer = 12 * hidden * hidden
    layers = max(1, round(mib * 2**20 / 12 / per_layer) - 1)
    return DecoderConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=4 * hidden * 2 // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    ).resolved()


def sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Contest:
    """What takes turns, on one rank."""

    def __init__(self, mesh: Mesh, mib: int, folder: Path) -> None:
        config = model_of(mib)
        (stage,) = build_stages(
            config, [range(config.num_hidden_layers)], [[0]], 0, seed=1, device=mesh.device, dtype=torch.float32
        ).values()
        self.mesh, self.folder = mesh, folder
        named = list(named_parameters_with_facts(stage))
        self.optimizer = ShardedAdamW(GradientBuckets(named, mesh, zero=1))
        self.parts = CheckpointParts(config, named, self.optimizer)
        self.state = {name: parameter.detach() for name, parameter, _ in named}
        for name, _, _ in named:
            for piece in self.optimizer.pieces(name):
                for kind in ("exp_avg", "exp_avg_sq"):
                    piece.tensors[kind].uniform_()
                    self.state[f"{name}.{kind}.{piece.start}"] = piece.tensors[kind]
        # The weights, and two moments of as many numbers, of which each rank has its part.
        self.num_bytes = 3 * sum(parameter.numel() * parameter.element_size() for _, parameter, _ in named)
        share = self.num_bytes // mesh.layout.world_size
        self.plain = torch.randint(0, 255, (share,), dtype=torch.uint8).numpy().data
        self.plan = make_plan(self.parts, mesh)  # once a run
        self.saver = BackgroundSaver(folder / "background", self.parts, mesh)

    def time(self, action: Callable[[], object]) -> float:
        """Return the seconds until all ranks have done it."""
        barrier(self.mesh.world)
        started = time.perf_counter()
        action()
        barrier(self.mesh.world)
        return time.perf_counter() - started

    def fresh(self, name: str) -> Path:
        barrier(self.mesh.world)
        if self.mesh.rank == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(parents=True)
        barrier(self.mesh.world)
        return self.folder / name

    def write_plain(self, folder: Path) -> None:
        with (folder / str(self.mesh.rank)).open("wb", buffering=0) as file:
            rest = self.plain
            while len(rest):
                rest = rest[file.write(rest[: 64 << 20]) :]
            os.fsync(file.fileno())

    def read_plain(self, folder: Path) -> None:
        target = bytearray(len(self.plain))
        with (folder / str(self.mesh.rank)).open("rb", buffering=0) as file:
            view = memoryview(target)
            while len(view):
                view = view[file.readinto(view) or 0 :]

    def save_torch(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state, checkpoint_id=folder, no_dist=self.mesh.world is None)

    def load_torch(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state, checkpoint_id=folder, no_dist=self.mesh.world is None)

    def round(self) -> dict[str, float]:
        """Let everyone save and load once."""
        seconds = {}
        plain = self.fresh("plain")
        seconds["save disk"] = self.time(lambda: self.write_plain(plain))
        ours = self.fresh("ours")
        seconds["save ours"] = self.time(lambda: save(ours, 1, self.parts, self.mesh, self.plan))
        theirs = self.fresh("theirs")
        seconds["save torch"] = self.time(lambda: self.save_torch(theirs))
        seconds["save torch + sync"] = seconds["save torch"] + self.time(
            lambda: sync_files(theirs) if self.mesh.rank == 0 else None
        )
        self.fresh("background")
        seconds["stop ours"] = self.time(lambda: self.saver.save(1))
        seconds["background ours"] = seconds["stop ours"] + self.time(self.saver.wait)
        for name, action in (
            ("disk", lambda: self.read_plain(plain)),
            ("ours", lambda: load(ours / "step-00000001", self.parts, self.mesh)),
            ("torch", lambda: self.load_torch(theirs)),
        ):
            if self.mesh.rank == 0:
                drop_from_cache(self.folder)
            seconds[f"load {name}"] = self.time(action)
        return seconds


RATIOS = {
    "save ours": "save disk",
    "save torch": "save disk",
    "save torch + sync": "save disk",
    "stop ours": "save ours",
    "background ours": "save ours",
    "load ours": "load disk",
    "load torch": "load disk",
}


def report(contest: Contest, results: Sequence[Mapping[str, float]]) -> None:
    print(
        f"{contest.num_bytes / 2**20:.0f} MiB, {contest.mesh.layout.world_size} ranks of dp with ZeRO 1, {len(results)} rounds"
    )
    print(f"up to {contest.saver.peak_bytes / 2**20:.0f} MiB more memory on a rank for saves in the background")
    print(f"{'':20}{'seconds':>9}{'MiB/s':>9}   time over that of")
    for name in results[0]:
        seconds = statistics.median(row[name] for row in results)
        line = f"{name:20}{seconds:9.3f}{contest.num_bytes / 2**20 / seconds:9.0f}"
        if name in RATIOS:
            ratio = statistics.median(row[name] / row[RATIOS[name]] for row in results)
            line += f"   {RATIOS[name]}: {ratio:.2f}"
        print(line)


@dataclass
class _Pieces:
    """A piece of a state, and an optimizer that has some."""

    start: int
    stop: int
    tensors: dict[str, torch.Tensor]


class _Sharded:
    """ZeRO 1 over dp ranks, in place of a real optimizer: the flat parameters cut into equal parts."""

    step_count = 0

    def __init__(self, sizes: Mapping[str, int], rank: int, ranks: int) -> None:
        total = sum(sizes.values())
        first, last = total * rank // ranks, total * (rank + 1) // ranks
        self._pieces: dict[str, list[_Pieces]] = {}
        offset = 0
        empty = torch.empty(0)
        for name, size in sizes.items():
            start, stop = max(first, offset), min(last, offset + size)
            if start < stop:
                tensors = {"exp_avg": empty, "exp_avg_sq": empty, "main_param": empty}
                self._pieces[name] = [_Pieces(start - offset, stop - offset, tensors)]
            offset += size

    def pieces(self, name: str) -> list[_Pieces]:
        return self._pieces.get(name, [])

    def weights(self, name: str) -> None:
        return None


def measure_plan(layout: Layout) -> None:
    """Print how long one rank takes for what all ranks of a save of a 70B model do alike."""
    config = DecoderConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ).resolved()
    per_stage = config.num_hidden_layers // layout.pp
    layers = [range(stage * per_stage, (stage + 1) * per_stage) for stage in range(layout.pp)]
    parameters: dict[str, list[int]] = {}
    pieces: dict[str, list[int]] = {}
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            group = Group("tp", layout.ranks_along(["tp"], layout.global_rank(pp=pp)), tp) if layout.tp > 1 else None
            stages = shape_stages(config, layers, [[rank] for rank in range(layout.pp)], pp, tp=group)
            named = [
                (name, parameter.to(torch.bfloat16), facts)
                for stage in stages.values()
                for name, parameter, facts in named_parameters_with_facts(stage, group)
            ]
            sizes = {name: parameter.numel() for name, parameter, _ in named}
            for dp in range(layout.dp):
                parts = CheckpointParts(config, named, _Sharded(sizes, dp, layout.dp), dtype=torch.bfloat16)
                for tables, table in zip((parameters, pieces), holdings.describe(parts), strict=True):
                    tables.setdefault(json.dumps(table), []).append(layout.global_rank(pp, dp, tp))
    parsed = [{tuple(ranks): json.loads(text) for text, ranks in tables.items()} for tables in (parameters, pieces)]
    started = time.perf_counter()
    sources = holdings.collect(*parsed)
    collected = time.perf_counter()
    model = model_targets(parts, sources)
    files = plan_files({"model/model": model, "optimizer/optimizer": optimizer_targets(model, sources)}, sources)
    planned = time.perf_counter()
    units = [unit for chosen in rounds(files, sources) for unit in chosen]
    done = time.perf_counter()
    moves = sum(len(unit.moves) for unit in units)
    print(
        f"{num_parameters(config) / 1e9:.1f}e9 parameters on {layout.world_size:,} ranks {layout}: {len(files)} files"
    )
    print(f"collect {collected - started:.2f} s, files {planned - collected:.2f} s, {len(units):,} units and")
    print(f"{moves:,} moves {done - planned:.2f} s, total {done - started:.2f} s, once a run")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=at_least(1), default=300)
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args()
    if options.plan:
        for layout in (Layout(tp=8, pp=16, dp=1), Layout(tp=8, pp=16, dp=8), Layout(tp=8, pp=16, dp=32)):
            measure_plan(layout)
        return
    if options.ranks > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={options.ranks}", "-m", "benchmarks.checkpoints", *sys.argv[1:]]
        sys.exit(subprocess.run(command).returncode)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of torch's checkpoints, about how they are going to change
    place = options.folder or Path(tempfile.gettempdir())
    with connect(Layout(dp=options.ranks)) as mesh:
        folder = place / f"parallax benchmark {os.environ.get('MASTER_PORT', os.getpid())}"
        try:
            contest = Contest(mesh, options.mib, folder)
            contest.round()
            results = [contest.round() for _ in range(options.rounds)]
            if mesh.rank == 0:
                print(json.dumps(describe_machine()))
                report(contest, results)
        finally:
            if mesh.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
