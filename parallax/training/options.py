"""How a run is laid out, how long it is, and what it leaves behind: options, each group with its check.

A check returns sentences and never raises, so that a command's errors come all at once; nothing here imports torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from parallax.errors import ConfigError
from parallax.flags import named
from parallax.mesh import Layout
from parallax.pipeline.actions import Schedule
from parallax.pipeline.costs import Costs
from parallax.pipeline.schedules import ALL_SCHEDULES, make_schedule
from parallax.pipeline.schedules.automatic import Choice, choose_schedule
from parallax.pipeline.split import parse_layout
from parallax.pipeline.tables import read_schedule
from parallax.pipeline.trace import read_trace
from parallax.storage import RemotePath, location


@dataclass(frozen=True)
class ParallelOptions:
    """How the processes share the work; tp * pp * dp is their number."""

    tp: Annotated[int, named("tp", "tensor-model-parallel-size")] = 1
    """Tensor parallel: slices of each matrix."""

    pp: Annotated[int, named("pp", "pipeline-model-parallel-size")] = 1
    """Pipeline parallel: slices of the layers."""

    dp: Annotated[
        int | None, named("dp", "data-parallel-size", metavar="INT", default="the processes that are left")
    ] = None
    """Data parallel: copies of the model, each with other rows of the batch."""

    sp: Annotated[bool, named("sp", "sequence-parallel")] = False
    """Sequence parallel: between the matrices, split the sequence over the tp ranks, which saves activation memory."""

    schedule: Annotated[str, named("schedule", metavar="|".join([*ALL_SCHEDULES, "auto", "FILE.csv"]))] = "1f1b"
    """Order of the micro-batches in the pipeline: one of ours, that which a simulation finds best, or your own table."""

    schedule_costs: Annotated[
        str | None, named("schedule-costs", metavar="FILE.json", default="equal, messages taking no time")
    ] = None
    """What --schedule auto simulates with: the times of a step that --trace-pipeline recorded on this machine."""

    chunks: Annotated[
        int | None,
        named("chunks", "num-virtual-stages-per-pipeline-rank", metavar="INT", default="as the schedule says"),
    ] = None
    """Stages on each pipeline rank, for the interleaved schedules."""

    pipeline_layout: Annotated[
        str | None,
        named("pipeline-layout", "pipeline-model-parallel-layout", metavar="TEXT", default="balanced by cost"),
    ] = None
    """Which stage holds what: E embedding, t layer, L loss, | between stages, as in "Et*3|t*4|t*4|t*3L"."""

    def layout(self, world_size: int, flag: str = "torchrun --nproc-per-node") -> tuple[Layout, list[str]]:
        """Return the layout of `world_size` processes and what keeps them from forming it, a sentence each.

        `flag` says how the number of processes is changed.
        """
        sizes = {"tp": self.tp, "pp": self.pp, "dp": 1 if self.dp is None else self.dp}
        problems = [f"--{axis} {size} must be at least 1" for axis, size in sizes.items() if size < 1]
        if problems:
            return Layout(max(1, self.tp), max(1, self.pp)), problems
        model_ranks = self.tp * self.pp
        given = f"--tp {self.tp} --pp {self.pp}" + (f" --dp {self.dp}" if self.dp is not None else "")
        dp = self.dp if self.dp is not None else world_size // model_ranks
        if model_ranks * dp != world_size:
            if self.dp is not None:
                needed, use = str(model_ranks * dp), [model_ranks * dp]
            else:
                below = world_size // model_ranks * model_ranks
                needed, use = f"a multiple of {model_ranks}", [n for n in (below, below + model_ranks) if n]
            problems.append(
                f"{given} takes {needed} processes, but there {'is' if world_size == 1 else 'are'} {world_size}; "
                f"use {flag} {' or '.join(map(str, use))}, or other sizes"
            )
        return Layout(self.tp, self.pp, max(1, dp)), problems

    def choose_schedule(self, num_micro_batches: int, num_layers: int) -> Choice:
        """Return what --schedule auto finds best of those that hold each stage once, and why."""
        costs = Costs() if self.schedule_costs is None else read_trace(self.schedule_costs).share_costs()
        once = [name for name, record in ALL_SCHEDULES.items() if not record.holds_twice]
        text = self.pipeline_layout
        if text is None:
            return choose_schedule(self.pp, num_micro_batches, costs, names=once, most_stages=num_layers)

        def cut(stages: int) -> list[range]:
            return parse_layout(text, num_layers, stages, self.pp)

        try:
            return choose_schedule(self.pp, num_micro_batches, costs, names=once, cut=cut)
        except ConfigError:
            cut(self.pp)  # what is wrong with the layout, rather than why each of the schedules cannot use it
            raise

    def make_schedule(self, num_micro_batches: int, num_layers: int) -> Schedule:
        """Return the table of a step's actions; raises ConfigError if there is none for these sizes, or the file is wrong."""
        if self.schedule == "auto":
            return self.choose_schedule(num_micro_batches, num_layers).schedule
        if self.schedule in ALL_SCHEDULES:
            return make_schedule(self.schedule, self.pp, num_micro_batches, self.chunks)
        if not self.schedule.endswith(".csv"):
            raise ConfigError(
                f"--schedule {self.schedule} is unknown; use {', '.join(ALL_SCHEDULES)}, auto, or the name of a .csv file"
            )
        if self.chunks is not None:
            raise ConfigError(f"--chunks {self.chunks} goes with a schedule by name; {self.schedule} says it itself")
        return read_schedule(self.schedule, self.pp, num_micro_batches)

    def check(self) -> list[str]:
        """Return what contradicts itself here, a sentence each."""
        problems = []
        if self.schedule_costs is not None and self.schedule != "auto":
            problems.append(
                f"--schedule-costs has no effect with --schedule {self.schedule}; use --schedule auto with it"
            )
        if self.chunks is not None and self.schedule == "auto":
            problems.append(f"--schedule auto finds the number of stages itself; leave out --chunks {self.chunks}")
        if self.sp and self.tp == 1:
            problems.append("--sp has no effect with --tp 1; leave it out, or use --tp 2 or more")
        return problems


@dataclass(frozen=True)
class TrainingOptions:
    """The batch, the length of the run, and the arithmetic."""

    seq_len: Annotated[int, named("seq-len", "seq-length")] = 128
    """Tokens in a sample."""

    micro_batch: Annotated[int, named("micro-batch", "micro-batch-size")] = 2
    """Samples that one process takes through the model at a time."""

    global_batch: Annotated[int, named("global-batch", "global-batch-size")] = 16
    """Samples in a step, over all processes: a multiple of micro-batch * dp."""

    steps: Annotated[int | None, named("steps", "train-iters", metavar="INT", default="100")] = None
    """Steps to train."""

    tokens: Annotated[int | None, named("tokens", metavar="INT", default="as --steps says")] = None
    """Tokens to train on, in place of --steps; rounded up to whole steps."""

    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Type of weights and activations; gradients, optimizer states and, with bf16, a second copy of the weights are fp32.
    fp8: as bf16, and the products of linear layers are of 8-bit numbers (docs/fp8.md)."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: the core of attention (selective) or whole layers (full)."""

    loss_chunk: Annotated[int, named("loss-chunk", metavar="TOKENS")] = 1024
    """Tokens whose logits are there at once; those of a longer micro-batch are computed in parts, and again in backward.
    0: all of them."""

    kernels: Literal["on", "off"] = "on"
    """Our own kernels on a GPU; off: PyTorch's operators there too. On a CPU it is those always."""

    compile: bool = False
    """Have torch.compile make what lies between the products of layers; the first step takes longer for it."""

    seed: int = 0
    """Of the initial weights and the data order."""

    DEFAULT_STEPS: ClassVar[int] = 100

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    def resolved(self) -> TrainingOptions:
        """Return these options with `steps` filled in."""
        if self.steps is not None:
            return self
        steps = self.DEFAULT_STEPS if self.tokens is None else -(-self.tokens // max(1, self.tokens_per_step))
        return replace(self, steps=steps)

    def check(self, dp: int) -> list[str]:
        """Return what is wrong with these options over `dp` data-parallel ranks, a sentence each."""
        problems = [
            f"--{name} {value} must be at least 1"
            for name, value in (
                ("micro-batch", self.micro_batch),
                ("global-batch", self.global_batch),
                ("steps", self.steps),
                ("tokens", self.tokens),
            )
            if value is not None and value < 1
        ]
        if self.steps is not None and self.tokens is not None:
            problems.append(
                f"--steps {self.steps} and --tokens {self.tokens} both say how long to train; give one of them"
            )
        if self.loss_chunk < 0:
            problems.append(f"--loss-chunk {self.loss_chunk} must be 0, for all tokens at once, or more")
        if not 0 <= self.seed < 2**63:
            problems.append(f"--seed {self.seed} must be between 0 and 2^63 - 1")
        unit = self.micro_batch * dp
        if self.micro_batch >= 1 and self.global_batch >= 1 and self.global_batch % unit:
            below = self.global_batch // unit * unit
            near = " or ".join(str(n) for n in (below, below + unit) if n)
            problems.append(
                f"--global-batch {self.global_batch} must be a multiple of --micro-batch {self.micro_batch} times dp {dp}, "
                f"which is {unit}; use {near}"
            )
        return problems


@dataclass(frozen=True)
class FinetuneTrainingOptions(TrainingOptions):
    """The batch, the length of the run, and the arithmetic."""

    seq_len: Annotated[int, named("seq-len", "seq-length")] = 512
    """Tokens in a row, which holds several chats; a longer chat is cut or left out, as --too-long says."""

    global_batch: Annotated[int, named("global-batch", "global-batch-size")] = 8
    """Rows in a step, over all processes: a multiple of micro-batch * dp."""


@dataclass(frozen=True)
class RunOptions:
    """What the run reports and saves, and where it starts."""

    out: Annotated[
        str | None,
        named(
            "out",
            "save",
            metavar="FOLDER|ADDRESS",
            default="runs/tiny, runs/tiny-sft: the model's name, or its folder's",
        ),
    ] = None
    """Folder for metrics.jsonl, TensorBoard events, config.json and checkpoints; or an address, such as s3://bucket/run, for the
    checkpoints, all else being in a folder of that name in runs/. parallax checkpoint list FOLDER lists them."""

    resume: Annotated[str, named("resume", metavar="auto|none|PATH")] = "auto"
    """Where to start: auto goes on from the newest complete checkpoint in --out, if any; PATH from that one."""

    save_every: Annotated[int, named("save-every", "save-interval")] = 0
    """Steps between checkpoints; 0 saves only at the end."""

    log_every: Annotated[int, named("log-every", "log-interval")] = 1
    """Steps between lines of metrics, beside those at evaluations and at the end; 0 turns them off."""

    eval_every: Annotated[int, named("eval-every", "eval-interval")] = 50
    """Steps between evaluations on the held-out part of the data, beside that at the end; 0 turns them off."""

    eval_steps: Annotated[int | None, named("eval-steps", "eval-iters", metavar="INT", default="8")] = None
    """Global batches in an evaluation."""

    trace_pipeline: Annotated[int | None, named("trace-pipeline", metavar="STEP", default="no step")] = None
    """Record what each pipeline rank does in this step, counted from 1, and draw it beside the simulation, in --out."""

    profile: Annotated[int | None, named("profile", metavar="STEP", default="no step")] = None
    """Record all ranks in this step, counted from 1, in one trace for ui.perfetto.dev, in --out."""

    timeout: Annotated[float, named("timeout", metavar="SECONDS")] = 600.0
    """How long a process waits for the others before it gives up."""

    config: Annotated[str | None, named("config", metavar="FILE", default="no file")] = None
    """TOML file of options, as in: tp = 2; those of the command line replace them. Also reads a run's config.json."""

    dry_run: bool = False
    """Print layout, parameters and memory per rank, bubble and traffic, and exit."""

    world_size: Annotated[int | None, named("world-size", metavar="INT", default="tp * pp * dp")] = None
    """Number of processes to plan for in a --dry-run, without a launcher."""

    DEFAULT_EVAL_STEPS: ClassVar[int] = 8

    def resolved(self, model_name: str) -> RunOptions:
        """Return these options with `out` and `eval_steps` filled in."""
        return replace(
            self,
            out=str(Path("runs") / model_name) if self.out is None else self.out,
            eval_steps=self.DEFAULT_EVAL_STEPS if self.eval_steps is None else self.eval_steps,
        )

    def check(self, nothing_held_out: str | None) -> list[str]:
        """Return what is wrong with these options, `out` filled in, a sentence each.

        nothing_held_out: the option of the data that leaves nothing to evaluate on, in words; None if there is something.
        """
        problems = [
            f"--{name} {value} must be 0, which turns it off, or more"
            for name, value in (
                ("save-every", self.save_every),
                ("log-every", self.log_every),
                ("eval-every", self.eval_every),
            )
            if value < 0
        ]
        if self.eval_steps is not None and self.eval_steps < 1:
            problems.append(f"--eval-steps {self.eval_steps} must be at least 1; --eval-every 0 turns evaluation off")
        if self.eval_steps is not None and self.eval_every == 0:
            problems.append(f"--eval-steps {self.eval_steps} has no effect with --eval-every 0; leave one of them out")
        if self.eval_every > 0 and nothing_held_out is not None:
            problems.append(f"{nothing_held_out} holds out nothing to evaluate on; use --eval-every 0 with it")
        problems += [
            f"--{name} {step} must be the number of a step, counted from 1"
            for name, step in (("trace-pipeline", self.trace_pipeline), ("profile", self.profile))
            if step is not None and step < 1
        ]
        if self.timeout <= 0:
            problems.append(f"--timeout {self.timeout} must be above 0 seconds")
        if self.world_size is not None and not self.dry_run:
            problems.append(
                "--world-size goes with --dry-run only; a run's number of processes is torchrun's --nproc-per-node"
            )
        if self.world_size is not None and self.world_size < 1:
            problems.append(f"--world-size {self.world_size} must be at least 1")
        return problems + self._check_places()

    def _check_places(self) -> list[str]:
        problems = [f"--{name} is empty; give a folder" for name in ("out", "resume") if getattr(self, name) == ""]
        if problems:
            return problems
        try:
            if self.resume not in ("auto", "none") and not location(self.resume).exists():
                problems.append(
                    f"--resume {self.resume}: there is no such checkpoint; use auto, none or the path of one"
                )
        except (ConfigError, OSError) as error:
            problems.append(f"--resume {self.resume}: {error}")
        if self.dry_run or self.out is None:
            return problems
        try:
            place = location(self.out)
            if isinstance(place, RemotePath):
                place.exists()
                if self.out.startswith("memory:"):
                    problems.append(f"--out {self.out} would be gone when its process ends; give a folder")
            elif reason := _why_not_writable(place) or _what_is_in_the_way(place):
                problems.append(f"--out {self.out} cannot be written: {reason}")
        except (ConfigError, OSError) as error:
            problems.append(f"--out {self.out} cannot be used: {error}")
        return problems


# What a run writes into its folder.
_FOLDERS = ("checkpoints", "tensorboard")
_FILES = (".lock", "config.json", "metrics.jsonl", "skipped.jsonl")


def _what_is_in_the_way(folder: Path) -> str | None:
    """Say what in the run's folder keeps a file or a folder of the run from being written there; None if nothing does."""
    for name in _FOLDERS:
        place = folder / name
        if os.path.lexists(place) and not place.is_dir():
            return f"{place} is no folder; move it away"
        if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
            return f"no permission to write in {place}"
    for name in _FILES:
        place = folder / name
        if os.path.lexists(place) and not place.is_file():
            return f"{place} is no file that can be written; move it away"
    return None


def _why_not_writable(folder: Path) -> str | None:
    """Say why files cannot be made in `folder`, which need not exist yet; None if they can."""
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.exists():
        return f"{place} is a link to something that is not there"
    if not place.is_dir():
        return f"{place} is a file, not a folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} does not permit it"
    return None
