"""The loop around the train step: learning rate, evaluation, metrics, checkpoints, and the ends that are not the last step.

A step's numbers say whether it was good and whether a rank was asked to stop. They are the same on all ranks, so all take the
same branch. On a GPU they are read one step late unless something else needs them at once, so that the device is never idle.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from parallax.collectives import all_reduce_, barrier
from parallax.data.loader import BatchLoader
from parallax.errors import EXIT_BAD_NUMBERS, LostRank, Stop
from parallax.models.config import DecoderConfig
from parallax.storage import Location
from parallax.training.faults import BadStep, Report, Verdict, culprits
from parallax.training.flops import Work, mfu
from parallax.training.metrics import Metrics, Stopwatch, peak_memory_bytes
from parallax.training.observe import Observer
from parallax.training.options import RunOptions
from parallax.training.safety import SafetyOptions
from parallax.training.signals import StopReason, StopRequests, decode
from parallax.training.state import TrainState
from parallax.training.step import TrainStep, evaluate
from parallax.training.watch import Watch


@dataclass(eq=False)
class Evaluation:
    """How a set that is not trained on is evaluated: its first `steps` global batches, fewer if it ends, the same each time.

    metric: the name of its loss in the metrics. only_at_end: it waits for the last step.
    """

    loader: BatchLoader
    steps: int
    metric: str = "eval_loss"
    only_at_end: bool = False


class Saves(Protocol):
    """Where checkpoints go; all methods are called by all ranks."""

    def save(self, state: TrainState) -> None:
        """Save the run as it is; may return as soon as the run may go on."""

    def finish(self) -> None:
        """Return when what was begun is on the disk."""

    def restore(self) -> tuple[Location, TrainState] | None:
        """Bring back the newest checkpoint of this run, None if there is none."""


@dataclass(eq=False)
class Run:
    """All that the loop works with.

    steps: of the whole run. learning_rate: of a step counted from 0. peak_flops: of all devices together. out: the run's folder.
    """

    options: RunOptions
    safety: SafetyOptions
    steps: int
    model: DecoderConfig
    train_step: TrainStep
    loader: BatchLoader
    evaluations: Sequence[Evaluation]
    metrics: Metrics
    state: TrainState
    learning_rate: Callable[[int], float]
    saves: Saves
    peak_flops: float
    out: Path


def fit(run: Run) -> None:
    """Train from `run.state` to the last step; a checkpoint is always left at the end.

    Raises Stop, on all ranks and after one has said why: a signal or --exit-after (the run is saved), or bad numbers (it is not).
    When another rank ends or stands still, one rank says so and the process ends with status 5.
    """
    with StopRequests(run.safety.exit_after) as requests, Watch(run.train_step.mesh) as watch:
        try:
            _Loop(run, requests).run_to_the_end()
        except LostRank as error:
            watch.stop_all(error)


@dataclass(frozen=True)
class _Issued:
    """A step that the device may still be working on. step: counted from 1; data_step: its place in the data order."""

    step: int
    data_step: int
    learning_rate: float
    report: Report
    local: torch.Tensor


class _Loop:
    def __init__(self, run: Run, requests: StopRequests) -> None:
        self.run, self.requests = run, requests
        self.mesh = run.train_step.mesh
        self.lag = 1 if self.mesh.device.type == "cuda" else 0
        self.issued: deque[_Issued] = deque()
        self.watch = Stopwatch()
        self.observer = Observer(run.train_step, run.options, run.out, run.state.step)
        self._say(self.observer.notices(0))
        self.stop: StopReason | None = None
        self.good: tuple[_Issued, list[float]] | None = None  # the last good step, and its numbers
        self.peak_is_believed = True
        self.bad_in_a_row = 0
        self.rollbacks: Counter[int] = Counter()  # by the step gone back to
        run.train_step.judge.mean_loss.fill_(run.state.mean_loss)

    def run_to_the_end(self) -> None:
        run, state, options = self.run, self.run.state, self.run.options
        saved = state.step
        while state.step < run.steps:
            self._issue()
            last = state.step == run.steps
            evaluates, logs = self._evaluates(state.step), self._logs(state.step)
            saves = last or _due(state.step, options.save_every)
            if self._settle(at_once=logs or saves) or (self.stop is not None and self._settle(at_once=True)):
                continue  # gone back
            values = self._measure(*self.good) if logs and self.good and self.good[0].step == state.step else {}
            started = time.perf_counter()
            for evaluation in run.evaluations if evaluates else ():
                if self.stop is None and (last or not evaluation.only_at_end):
                    values |= self._evaluate(evaluation)
            self.watch.pause(time.perf_counter() - started)
            if values:
                # It counts as a part of the next step, in which the other ranks wait for the one that writes.
                run.metrics.write({"step": state.step} | values)
            started = time.perf_counter()
            if saves or self.stop is not None:
                self.mesh.journal.enter(f"the save of step {state.step}")
                run.saves.save(self._counted())
                saved = state.step
            self.watch.pause(time.perf_counter() - started)
            if self.stop is not None and (evaluates or not last):
                run.saves.finish()
                done = (
                    f"all {run.steps} steps are done and saved, without the last evaluation"
                    if last
                    else f"step {state.step} of {run.steps} is saved; the same command goes on from there"
                )
                self._end(f"{self.stop.reason}: {done}", self.stop.status)
        run.saves.finish()
        assert saved == state.step, (saved, state)

    def _say(self, notices: Sequence[str]) -> None:
        for notice in notices:
            self.run.metrics.say(notice)

    def _evaluates(self, step: int) -> bool:
        last = step == self.run.steps
        return bool(self.run.evaluations) and (last or _due(step, self.run.options.eval_every))

    def _logs(self, step: int) -> bool:
        every = self.run.options.log_every
        return self._evaluates(step) or _due(step, every) or (step == self.run.steps and every > 0)

    def _issue(self) -> None:
        """Start the next step, which the device need not have done on return."""
        run, state = self.run, self.run.state
        self.mesh.journal.enter(f"step {state.step + 1}")
        lr = run.learning_rate(state.step)
        data_step = state.data_step
        with self.observer.step(state.step + 1, self._logs(state.step + 1)) as recorder:
            with nullcontext() if recorder is None else recorder.phase("data"):
                batches = run.loader.micro_batches(data_step)
            result = run.train_step(batches, lr, recorder, self.requests.code)
        state.step += 1
        self.watch.steps += 1
        run.metrics.advance(state.step)
        self.issued.append(_Issued(state.step, data_step, lr, Report(result.numbers()), result.local))
        started = time.perf_counter()
        self._say(self.observer.notices(state.step))
        self.watch.pause(time.perf_counter() - started)

    def _settle(self, at_once: bool) -> bool:
        """Act on the numbers of the steps that were started, of the newest only if it must be `at_once`.

        Returns whether the run went back to a checkpoint.
        """
        while len(self.issued) > (0 if at_once else self.lag):
            step = self.issued.popleft()
            numbers = step.report.read()
            self.stop = self.stop or decode(numbers[4])
            verdict = Verdict(int(numbers[3]))
            self.watch.work = Work(*(a + b for a, b in zip(self.watch.work, numbers[6:], strict=True)))
            if verdict is Verdict.GOOD:
                self.run.state.tokens += round(numbers[6])
                self._tell_infinite(step.step, round(numbers[5]))
                self.bad_in_a_row = 0
                self.good = step, numbers
            else:
                self.run.train_step.optimizer.take_back_count()
                self.run.state.skipped += 1
                if self._went_back(step, numbers, verdict):
                    return True
        return False

    def _tell_infinite(self, step: int, amaxes: int) -> None:
        fp8 = self.run.train_step.fp8
        if amaxes and fp8 is not None and fp8.scales is not None:
            self.run.metrics.say(f"fp8            step {step}: {fp8.scales.describe_infinite(amaxes)}")

    def _went_back(self, step: _Issued, numbers: list[float], verdict: Verdict) -> bool:
        """Do what is to be done about a step that did not change the weights; return whether the run went back."""
        safety, size = self.run.safety, self.run.loader.global_batch_size
        bad = BadStep(
            step=step.step,
            verdict=verdict,
            loss=numbers[0],
            grad_norm=numbers[1],
            learning_rate=step.learning_rate,
            mean_loss=self.run.train_step.judge.mean_loss.item(),
            first_sample=step.data_step * size,
            last_sample=(step.data_step + 1) * size - 1,
            ranks=culprits(step.local, self.mesh) if verdict is Verdict.NOT_FINITE else (),
        )
        self.run.metrics.skipped(bad.to_json())
        if not verdict.is_bad:
            self.run.metrics.say(f"skipped        {bad}")
            return False
        self.bad_in_a_row += 1
        if safety.on_bad_step == "abort":
            self._give_up(
                f"{bad}; start again from an earlier checkpoint, with --on-bad-step skip, or with a lower --lr"
            )
        if self.bad_in_a_row >= safety.max_bad_steps:
            self._give_up(f"{bad}, bad step {self.bad_in_a_row} in a row; --max-bad-steps allows no more")
        if safety.on_bad_step == "rollback":
            self._go_back(bad, step)
            return True
        self.run.metrics.say(f"skipped        {bad}")
        return False

    def _go_back(self, bad: BadStep, step: _Issued) -> None:
        """Restore the newest checkpoint, and go on with the data after the bad step."""
        run = self.run
        self.issued.clear()
        run.saves.finish()
        restored = run.saves.restore()
        if restored is None:
            self._give_up(f"{bad}, and there is no checkpoint to roll back to yet")
        path, state = restored
        self.rollbacks[state.step] += 1
        if self.rollbacks[state.step] > run.safety.max_bad_steps:
            self._give_up(
                f"{bad}, after {run.safety.max_bad_steps} rollbacks to {path}; --max-bad-steps allows no more"
            )
        state.data_shift = step.data_step + 1 - state.step
        vars(run.state).update(vars(state))
        run.train_step.judge.mean_loss.fill_(state.mean_loss)
        run.metrics.rewind(state.step)
        self.watch = Stopwatch()
        run.metrics.say(f"rolled back    {bad}; going on from {path} with the data after it")

    def _give_up(self, reason: str) -> NoReturn:
        self.run.saves.finish()
        self._end(f"{reason}; training stops without saving", EXIT_BAD_NUMBERS)

    def _end(self, message: str, status: int) -> NoReturn:
        """Say it from one rank before any of them ends, since a launcher ends all others with the first."""
        self.run.metrics.say(message)
        barrier(self.mesh.world)
        raise Stop(message, status)

    def _counted(self) -> TrainState:
        return replace(self.run.state, mean_loss=self.run.train_step.judge.mean_loss.item())

    def _measure(self, step: _Issued, numbers: list[float]) -> dict[str, Any]:
        """The values of one logged step, whose numbers have been waited for."""
        run = self.run
        seconds, steps, work = self.watch.read()
        share = mfu(work.flops(run.model) / seconds, run.peak_flops)
        if share is None and self.peak_is_believed:
            self.peak_is_believed = False
            run.metrics.say("mfu            unknown: the machine was too busy at the start for its peak to be measured")
        return {
            "loss": numbers[0],
            "grad_norm": numbers[1],
            "lr": step.learning_rate,
            "tokens": run.state.tokens,
            "tokens_per_second": work.targets / seconds,
            "mfu": share if self.peak_is_believed else None,
            "step_seconds": seconds / steps,
            "memory_bytes": peak_memory_bytes(self.mesh.device),
            # That of several steps is their mean, and one of them was recorded.
            **self.observer.values(seconds if steps == 1 else None),
        }

    def _evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Return the set's loss; nothing if a rank was asked to stop meanwhile, or if there is nothing to predict."""
        self.mesh.journal.enter(f"the evaluation after step {self.run.state.step}")
        steps = min(evaluation.steps, evaluation.loader.steps_per_epoch)
        batches = (evaluation.loader.micro_batches(step) for step in range(steps))
        loss = evaluate(self.run.train_step.runner, batches, self._asked_to_stop)
        return {} if loss is None else {evaluation.metric: loss}

    def _asked_to_stop(self) -> bool:
        code = torch.tensor([self.requests.code()], dtype=torch.float64, device=self.mesh.device)
        self.stop = decode(all_reduce_(code, self.mesh.world).item())
        return self.stop is not None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
