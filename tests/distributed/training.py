"""Train a model on made-up tokens in any layout, through the same code as pretrain.py; for tests that compare layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from parallax.data.loader import BatchLoader
from parallax.data_parallel.options import OptimizerOptions
from parallax.mesh import Mesh
from parallax.models.config import DecoderConfig
from parallax.objectives.next_token import NextToken
from parallax.pipeline.schedules import make_schedule
from parallax.pipeline.tables import parse_csv
from parallax.precision.options import Fp8Options
from parallax.training.build import build_train_step
from parallax.training.lr import LearningRateOptions, learning_rate
from parallax.training.options import TrainingOptions
from parallax.training.stages import stage_ranges
from parallax.training.step import TrainStep

SMALL = DecoderConfig(
    vocab_size=131,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.1,
).resolved()


class MadeUpTokens:
    """Samples `[seq + 1]` of a noisy cycle: something can be learnt, and every sample differs."""

    def __init__(self, vocab_size: int, seq_len: int, count: int = 64) -> None:
        generator = np.random.Generator(np.random.Philox(11))
        steps = generator.integers(0, 3, (count, seq_len + 1))
        self.samples = (np.cumsum(steps, 1) + generator.integers(0, vocab_size, (count, 1))) % vocab_size
        self.fingerprint = f"made up {vocab_size} {seq_len}"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.samples[i]


@dataclass(frozen=True)
class Case:
    """One way to train: what may not change the losses, and what does (the model, the batch)."""

    model: DecoderConfig = SMALL
    zero: int = 1
    sp: bool = False
    schedule: str = "1f1b"  # or a table, as CSV
    chunks: int | None = None
    micro_batch: int = 2
    global_batch: int = 8
    seq_len: int = 16
    steps: int = 10
    recompute: str = "none"
    loss_chunk: int = 0
    compiled: bool = False
    precision: str = "fp32"
    pipeline_layout: str | None = None
    zero_group: int | None = None
    overlap_gather: bool = True
    optimizer: str = "adamw"
    fp8: Fp8Options = Fp8Options()
    narrow: tuple[str, ...] = ()  # options of the optimizer that say bf16

    @property
    def optimizer_options(self) -> OptimizerOptions:
        narrow = dict.fromkeys(self.narrow, "bf16")
        overlap = "on" if self.overlap_gather else "off"
        return OptimizerOptions(self.optimizer, self.zero, self.zero_group, overlap, **narrow)

    @property
    def reference(self) -> Case:
        """The same training in its plainest form."""
        return replace(
            self,
            zero=0,
            zero_group=None,
            overlap_gather=False,
            narrow=(),
            sp=False,
            schedule="1f1b",
            chunks=None,
            micro_batch=2 - self.global_batch % 2,
            recompute="none",
            loss_chunk=0,
            compiled=False,
            pipeline_layout=None,
        )


def build(mesh: Mesh, case: Case) -> TrainStep:
    """Return the train step of a case."""
    training = TrainingOptions(
        seq_len=case.seq_len,
        micro_batch=case.micro_batch,
        global_batch=case.global_batch,
        steps=case.steps,
        precision=case.precision,
        recompute=case.recompute,
        loss_chunk=case.loss_chunk,
        compile=case.compiled,
        seed=5,
    )
    micro_batches = case.global_batch // (case.micro_batch * mesh.layout.dp)
    if "," in case.schedule:
        schedule = parse_csv(case.schedule, "own")
    else:
        schedule = make_schedule(case.schedule, mesh.layout.pp, micro_batches, case.chunks)
    layers = stage_ranges(case.model, schedule.num_stages, case.pipeline_layout, case.seq_len)
    objective = NextToken(case.model.vocab_size, mesh.tp)
    options = case.optimizer_options
    return build_train_step(
        mesh, case.model, layers, schedule, training, options, objective, sequence_parallel=case.sp, fp8=case.fp8
    )


def loader_of(mesh: Mesh, case: Case) -> BatchLoader:
    """Return the batches of a case for this rank."""
    data = MadeUpTokens(case.model.vocab_size, case.seq_len)
    return BatchLoader(data, 5, case.global_batch, case.micro_batch, mesh.dp_rank, mesh.layout.dp)


def train(mesh: Mesh, case: Case) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step."""
    step, loader = build(mesh, case), loader_of(mesh, case)
    rates = LearningRateOptions(lr=1e-3, warmup_steps=2).resolved(case.steps, case.model.hidden_size)
    results = [step(loader.micro_batches(i), learning_rate(i, rates)) for i in range(case.steps)]
    return [(result.loss.item(), result.grad_norm.item()) for result in results]


def train_all(mesh: Mesh, cases: list[Case]) -> list[list[tuple[float, float]]]:
    """Train each case in turn, in one world."""
    return [train(mesh, case) for case in cases]
