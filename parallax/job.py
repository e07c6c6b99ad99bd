"""A run from its configuration to its last step: data, mesh, where to start, model and optimizer, the loop.

    run(parse_pretrain(words), prepare, train)

is what pretrain.py and finetune_sft.py do, each with two functions of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from parallax.config import RunConfig
from parallax.data.checksums import DataFile
from parallax.data.loader import BatchLoader, Samples
from parallax.data.tokenizers import Tokenizer
from parallax.differences import changes_that_matter
from parallax.errors import EXIT_INTERRUPTED, ConfigError, Stop, exit_with_problems
from parallax.host_memory import keep_freed_memory
from parallax.mesh import Mesh, connect
from parallax.training.lr import learning_rate

if TYPE_CHECKING:
    from parallax.storage import Location
    from parallax.training.checkpoints import Resume
    from parallax.training.run_lock import RunLock
    from parallax.training.step import Objective


class Prepared(Protocol):
    """What is trained on. files: of the data, with checksums. description: a line for the user. tokenizer: saved with the model.

    notices: what the user should know before the run, a line each.
    """

    @property
    def train(self) -> Samples: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def description(self) -> str: ...

    @property
    def files(self) -> tuple[DataFile, ...]: ...

    @property
    def notices(self) -> tuple[str, ...]: ...

    def evaluated(self) -> Sequence[tuple[str, Any, bool]]:
        """Return what is evaluated: its name in the metrics, its samples, and whether that is done at the end only."""


Config = TypeVar("Config", bound=RunConfig)
Data = TypeVar("Data", bound=Prepared)


def run(config: Config, prepare: Callable[[Config], Data], train: Callable[[Config, Data, Mesh], None]) -> None:
    """Do what a command line asks for, and end the process where it cannot be done: a sentence for each problem, and a status.

    prepare: makes the data ready, before any rank meets another. train: calls this module's `train` with an objective.
    """
    # Idle OpenMP threads that spin make a run on a busy CPU many times slower; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["PARALLAX_KERNELS"] = config.training.kernels
    try:
        if config.run.dry_run:
            from parallax.training.plan import print_plan

            print_plan(config)
            return
        _check_backend(config)
        data = prepare(config)
        with connect(config.layout, config.run.timeout) as mesh:
            train(config, data, mesh)
    except ConfigError as error:
        exit_with_problems(error.problems, config.asked.program)
    except Stop as stop:
        sys.exit(stop.status)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("stopped; the same command goes on from the newest checkpoint, if there is one", file=sys.stderr)
        os._exit(EXIT_INTERRUPTED)  # at once: other ranks may be waiting in a collective


def _check_backend(config: RunConfig) -> None:
    """Raise ConfigError if FP8 cannot run here as it is asked for; the data, which may take hours, is not needed to see that."""
    if config.training.precision != "fp8":
        return
    # Here, for they import torch; without FP8 that can wait until the data is there.
    from parallax.models.config import linear_layers
    from parallax.precision.backends.choose import choose_backend, this_device

    choose_backend(config.fp8, this_device(), linear_layers(config.model_config), config.layout.tp)


def train(config: RunConfig, data: Prepared, objective: Objective, mesh: Mesh) -> None:
    """Train to the last step; called by every rank, with the same configuration and data.

    Raises ConfigError for what only shows once files are read or ranks compared, Stop when the run ends before its last step.
    """
    # Importing torch takes seconds, so it waits until the options and the data are known to be good.
    from parallax.training.checkpoints import Resume, agree
    from parallax.training.run_lock import only_run_in

    if mesh.device.type == "cpu":
        keep_freed_memory()
    identity = config.to_dict() | {"data": data.train.fingerprint, "tokenizer": data.tokenizer.fingerprint}
    agree(identity | {"initial weights": str(config.init)}, mesh)
    identity["data_files"] = data.files
    resume = Resume(config.run.resume, config.checkpoints, identity, changes_that_matter)
    # Before a checkpoint is chosen, or another run could save a newer one meanwhile.
    with only_run_in(config.out, mesh) as lock:
        _train(config, data, objective, mesh, resume, lock)


def _train(config: RunConfig, data: Prepared, objective: Objective, mesh: Mesh, resume: Resume, lock: RunLock) -> None:
    from parallax.checkpoint.agreement import together
    from parallax.checkpoint.initial_weights import load_weights, look_into
    from parallax.checkpoint.parts import CheckpointParts
    from parallax.training.build import DTYPES, build_train_step, describe_fp8
    from parallax.training.checkpoints import Checkpoints
    from parallax.training.fit import Evaluation, Run, fit
    from parallax.training.flops import total_peak_flops
    from parallax.training.metrics import Metrics

    model, training = config.model_config, config.training
    start = resume.find(mesh)
    carried = look_into(None if start else config.init, config.carried_from, model, mesh)
    train_step = build_train_step(
        mesh,
        model,
        config.stage_ranges,
        config.schedule,
        training,
        config.optimizer,
        objective,
        sequence_parallel=config.parallel.sp,
        spike_factor=config.safety.spike_factor,
        fp8=config.fp8,
    )
    dtype = DTYPES[training.precision]
    parts = CheckpointParts(model, train_step.parameters, train_step.optimizer, data.tokenizer, dtype=dtype, **carried)
    parts.scales = train_step.fp8.scales if train_step.fp8 is not None else None
    start, state = resume.restore(start, parts, mesh)
    if start is None and config.init is not None:
        load_weights(config.init, parts, mesh)

    batch = (training.seed, training.global_batch, training.micro_batch, mesh.dp_rank, mesh.layout.dp)
    loader = BatchLoader(data.train, *batch, pin_memory=mesh.device.type == "cuda")
    evaluations = [
        Evaluation(BatchLoader(part, *batch, shuffle=False), config.eval_steps, metric, only_at_end)
        for metric, part, only_at_end in data.evaluated()
        if config.run.eval_every
    ]

    def open_metrics() -> Metrics:
        if mesh.rank == 0 and state.step < config.steps:  # a command that does nothing leaves the record as it is
            config.save()
        return Metrics(config.out, mesh.rank, config.steps, state.step, state.data_step * training.global_batch)

    with together(open_metrics, mesh, f"writing to --out {config.out}") as metrics:
        metrics.show(config.describe())
        for line in _introduction(config, data, describe_fp8(train_step.fp8, config.fp8_layers), start, state.step):
            metrics.say(line)
        fit(
            Run(
                config.run,
                config.safety,
                config.steps,
                model,
                train_step,
                loader,
                evaluations,
                metrics,
                state,
                lambda step: learning_rate(step, config.learning_rate),
                Checkpoints(config.checkpoints, parts, resume.identity, mesh, config.safety, lock, metrics.say),
                total_peak_flops(mesh, dtype),
                config.out,
            )
        )
        metrics.say(f"done           {config.describe_end()}")


def _introduction(
    config: RunConfig, data: Prepared, fp8: Iterable[str], start: Location | None, step: int
) -> Iterator[str]:
    """Yield what the user is told before the first step, a line each. step: how many are done."""
    yield f"data           {data.description}"
    yield from (f"notice         {line}" for line in data.notices)
    if config.safety.exit_after is not None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        yield "notice         torchrun --max-restarts starts this run again also after --exit-after, for as many minutes"
    yield from fp8
    if config.why_schedule is not None:
        yield f"schedule       {config.why_schedule}"
    yield f"going on from  {start}" if start else f"starting from  {config.describe_start()}"
    if step >= config.steps:
        decay = config.learning_rate.lr_decay_steps
        kept = f" (and --lr-decay-steps {decay}, as before)" if decay is not None else ""
        yield f"nothing to do  step {step} of {config.steps} is done; ask for more --steps{kept}, or another --out"
