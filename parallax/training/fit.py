"""The loop around the train step: learning rate, evaluation, metrics, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallax.data.loader import BatchLoader
from parallax.errors import ConfigError
from parallax.pipeline.recorder import Recorder
from parallax.training.flops import mfu
from parallax.training.metrics import Metrics, Stopwatch, peak_memory_bytes
from parallax.training.options import RunOptions
from parallax.training.pipeline_trace import write_pipeline_trace
from parallax.training.state import TrainState
from parallax.training.step import StepResult, TrainStep, evaluate


@dataclass(eq=False)
class Evaluation:
    """How a set that is not trained on is evaluated: its first `steps` global batches, the same each time.

    metric: the name of its loss in the metrics. only_at_end: it waits for the last step.
    """

    loader: BatchLoader
    steps: int
    metric: str = "eval_loss"
    only_at_end: bool = False


@dataclass(eq=False)
class Run:
    """All that the loop works with.

    steps: of the whole run. tokens_per_step: targets of one step, over all ranks. learning_rate: of a step counted from 0.
    save: writes a checkpoint of the state as it is. flops_per_token: the model's own operations. peak_flops: of all devices
    together. out: the run's folder.
    """

    options: RunOptions
    steps: int
    tokens_per_step: int
    train_step: TrainStep
    loader: BatchLoader
    evaluations: Sequence[Evaluation]
    metrics: Metrics
    state: TrainState
    learning_rate: Callable[[int], float]
    save: Callable[[TrainState], Path]
    flops_per_token: float
    peak_flops: float
    out: Path


def fit(run: Run) -> None:
    """Train from `run.state` to the last step; a checkpoint is always left at the end."""
    options, state, metrics = run.options, run.state, run.metrics
    watch, saved = Stopwatch(), state.step
    while state.step < run.steps:
        lr = run.learning_rate(state.step)
        traced = state.step + 1 == options.trace_pipeline
        recorder = Recorder(run.train_step.mesh.pp, run.train_step.mesh.device) if traced else None
        result = run.train_step(run.loader.micro_batches(state.step), lr, recorder)
        state.step += 1
        state.tokens += run.tokens_per_step
        watch.steps += 1
        metrics.advance(state.step)
        if recorder is not None:
            _write_trace(run, recorder)
        last = state.step == run.steps
        evaluates = bool(run.evaluations) and (last or _due(state.step, options.eval_every))
        values: dict[str, float] = {}
        if evaluates or _due(state.step, options.log_every) or (last and options.log_every):
            values = _measure(run, result, lr, watch)
        saves = last or _due(state.step, options.save_every)
        if values or saves:
            _check_finite(run, result, lr)
        started = time.perf_counter()
        for evaluation in run.evaluations if evaluates else ():
            if last or not evaluation.only_at_end:
                values[evaluation.metric] = _evaluate(run.train_step, evaluation)
        if values:
            metrics.write(values)
        if saves:
            run.save(state)
            saved = state.step
        watch.pause(time.perf_counter() - started)
    assert saved == state.step, (saved, state)


def _write_trace(run: Run, recorder: Recorder) -> None:
    """Write the step as the first of the pipelines ran it."""
    schedule = run.train_step.runner.training.schedule
    trace = recorder.trace(f"{schedule.name} step {run.state.step}")
    if run.train_step.mesh.rank == 0:
        files = write_pipeline_trace(trace, run.out)
        run.metrics.say(f"traced         step {run.state.step}: {', '.join(map(str, files))}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _check_finite(run: Run, result: StepResult, lr: float) -> None:
    """Stop before numbers that are none are saved; all ranks see the same and stop together."""
    loss, grad_norm = result.loss.item(), result.grad_norm.item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise ConfigError(
            f"step {run.state.step} has loss {loss} and gradient norm {grad_norm}, so training stops without saving; "
            f"the learning rate was {lr:g}: start again from an earlier checkpoint or with a lower --lr"
        )


def _measure(run: Run, result: StepResult, lr: float, watch: Stopwatch) -> dict[str, float]:
    """The values of one logged step; the only place where the loop waits for the device."""
    loss, grad_norm = result.loss.item(), result.grad_norm.item()
    seconds, steps = watch.read()
    speed = steps * run.tokens_per_step / seconds
    return {
        "step": run.state.step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens": run.state.tokens,
        "tokens_per_second": speed,
        "mfu": mfu(speed, run.flops_per_token, run.peak_flops),
        "step_seconds": seconds / steps,
        "memory_bytes": peak_memory_bytes(run.train_step.mesh.device),
    }


def _evaluate(train_step: TrainStep, evaluation: Evaluation) -> float:
    batches = (evaluation.loader.micro_batches(step) for step in range(evaluation.steps))
    return evaluate(train_step.runner, batches)
