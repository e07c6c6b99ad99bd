"""Run any checked schedule on this rank's stages; it knows no schedule by name and no model.

    executor = PipelineExecutor(SCHEDULES["1f1b"](mesh.layout.pp, 8), mesh.pp, {mesh.pp_rank: stage}, spec)
    losses = executor.run()          # on ranks that hold the last stage; [] elsewhere

A stage is a function (input or None, micro_batch) -> output. The first gets None and finds its own input by the
micro-batch's number; the last returns, in training, the scalar to run backward on, scaled as the caller wants it. One
process with one stage runs the same loop: gradient accumulation.

A split backward (I, then W) puts off what the stage's parallel layers hand to `weights`, the queue that their sinks were
attached to (parallax.tensor_parallel.weight_gradients); all else is computed in I. A pair takes its forward and its backward in
turn, segment by segment, if the stage has a method `segments(micro_batch)` (parallax.tensor_parallel.segments); otherwise one
after the other.

What a rank keeps of a forward is its input and the edge of the autograd graph at its output. The output itself is gone
as soon as it has been sent, unless the stage's own backward needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch

from parallax.errors import ConfigError, LostRank
from parallax.journal import Journal
from parallax.mesh import Group, rank_of, size_of
from parallax.pipeline.actions import Action, Entry, Pair, Schedule
from parallax.pipeline.check import check_schedule
from parallax.pipeline.lower import Message, Program, Receive, Send, Step, post_early
from parallax.pipeline.recorder import Recorder
from parallax.pipeline.segments import Steps, Trace, alone, backward_steps, forward_steps, in_turn
from parallax.pipeline.shared_transport import make_transport
from parallax.pipeline.transport import ActivationSpec, Transport
from parallax.tensor_parallel.segments import Segment
from parallax.tensor_parallel.weight_gradients import WeightQueue

Stage = Callable[[torch.Tensor | None, int], torch.Tensor]

_log = logging.getLogger(__name__)


class BackwardListener(Protocol):
    """Is told when gradients of a stage's weights are made."""

    def expect_last_backward(self, stage: int, /) -> None:
        """The run of autograd backward that comes next is the stage's last in this step."""

    def before_backward(self, stage: int, /) -> None:
        """The B, or after an I the W, that comes next completes the gradients of one of the stage's micro-batches."""

    def after_backward(self, stage: int, /) -> None:
        """They are complete."""


@dataclass
class _Run:
    """The state of one step on one rank."""

    program: Program
    last_backwards: dict[Action, int]
    listener: BackwardListener | None
    recorder: Recorder | None
    cut: bool  # whether chunks are cut into segments
    results: dict[Action, torch.Tensor | None] = field(default_factory=dict)  # until sent, or used by a stage here
    sent: set[Message] = field(default_factory=set)  # before their turn
    following: Step | None = None  # what comes after the step that is being done
    forwarded: dict[tuple[int, int, int], Trace] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


@runtime_checkable
class Cuttable(Protocol):
    """A stage that can be cut where it communicates."""

    def __call__(self, tensor: torch.Tensor | None, micro_batch: int, /) -> torch.Tensor: ...

    def segments(self, micro_batch: int, /) -> Sequence[Segment]: ...


class PipelineExecutor:
    """Runs a schedule's actions for one rank.

    schedule: what `run` does when it is given nothing else.
    pp: the pipeline's ranks; None when this process holds all stages.
    stages: for each stage of this rank, its function.
    spec: shape and dtype of what stages hand on; None: the first step finds out, and is slower for it.
    weights: where the stages' layers put off their weights' gradients; needed by schedules with W.
    lookahead: how many receives are posted beyond the one that is waited for.
    journal: is told of each step as it begins.

    `peak_in_flight` is the most micro-batches of one stage each whose activations were held at once in the last run.
    """

    def __init__(
        self,
        schedule: Schedule,
        pp: Group | None,
        stages: Mapping[int, Stage],
        spec: ActivationSpec | None = None,
        device: torch.device | str = "cpu",
        *,
        weights: WeightQueue | None = None,
        transport: Transport | None = None,
        lookahead: int = 2,
        journal: Journal | None = None,
    ) -> None:
        self.weights = weights or WeightQueue()
        self._journal = journal
        # One line a rank, and of several pipelines that are alike only the first speaks.
        self._tells_of_empty = pp is None or pp.ranks[0] == 0
        self.rank, self.num_ranks, self.stages, self.lookahead = rank_of(pp), size_of(pp), dict(stages), lookahead
        self.peak_in_flight = 0
        self._in_flight = 0
        self._early: WeakKeyDictionary[Program, tuple[Step, ...]] = WeakKeyDictionary()
        if transport is None and pp is not None:
            transport = make_transport(pp, torch.device(device), spec)
        self._transport = transport
        self.program = self.prepare(schedule)

    def prepare(self, schedule: Schedule) -> Program:
        """Check and lower another schedule for `run`; raises ConfigError if it is wrong or does not fit these ranks."""
        if schedule.num_ranks != self.num_ranks:
            raise ConfigError(
                f"schedule {schedule.name} is for {schedule.num_ranks} ranks and the pipeline has {self.num_ranks}; "
                "make it with as many stages as --pp says"
            )
        mine = schedule.stages_of(self.rank)
        if set(mine) != self.stages.keys():
            raise ConfigError(
                f"pipeline rank {self.rank} holds the stages {list(mine)} in schedule {schedule.name}, "
                f"and was given functions for {sorted(self.stages)}"
            )
        return check_schedule(schedule)

    def run(
        self,
        program: Program | None = None,
        listener: BackwardListener | None = None,
        recorder: Recorder | None = None,
    ) -> list[torch.Tensor]:
        """Do one step; called by every rank of the pipeline with the same program.

        listener: is told when gradients are made.
        recorder: is told what runs when.
        Returns the last stage's outputs, detached, in the order of the micro-batches; [] on other ranks.
        Raises RuntimeError, naming the action, if another rank is gone.
        """
        walk = self.walk(program, listener, recorder)
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return end.value

    def walk(
        self,
        program: Program | None = None,
        listener: BackwardListener | None = None,
        recorder: Recorder | None = None,
    ) -> Generator[Step, None, list[torch.Tensor]]:
        """Do the same step by step: yields each step just before it is done."""
        program = program or self.program
        if not (program.schedule.forward_only or torch.is_grad_enabled()):
            raise ConfigError(
                f"schedule {program.schedule.name} has backwards, and gradients are turned off (torch.no_grad); run it outside, "
                "or its forwards() alone"
            )
        run = _Run(
            program,
            program.schedule.last_backwards(self.rank),
            listener,
            recorder,
            cut=any(isinstance(entry, Pair) for entry in program.schedule.order[self.rank]),
        )
        self._in_flight = self.peak_in_flight = 0
        self.weights.clear()
        steps = self._steps(program)
        for place, step in enumerate(steps):
            run.following = steps[place + 1] if place + 1 < len(steps) else None
            yield step
            self._do(run, step)
        if self._transport is not None:
            self._transport.finish()
        return [run.outputs[number] for number in sorted(run.outputs)]

    def _do(self, run: _Run, step: Step) -> None:
        if self._journal is not None:
            self._journal.act(step)
        if isinstance(step, Receive):
            self._connected.post(step.message)
            if run.recorder is not None:
                run.recorder.posted(step.message)
        elif isinstance(step, Send):
            self._send(run, step.message)
        else:
            first = self._input(run, step.parts[0])
            started = None if run.recorder is None else run.recorder.now()
            try:
                self._compute(run, step, first)
            except LostRank:
                raise
            except RuntimeError as error:  # a collective in a stage, whose other ranks are gone
                raise RuntimeError(f"pipeline rank {self.rank}, in {step}: {error}") from error
            if run.recorder is not None:
                run.recorder.ran(step, started)

    def _compute(self, run: _Run, entry: Entry, first: torch.Tensor | None) -> None:
        if isinstance(entry, Pair):
            in_turn(self._first_of_pair(run, entry.forward, first), self._second_of_pair(run, entry.backward))
        elif entry.kind == "W":
            self._weights(run, entry)
        elif entry.kind == "F":
            alone(self._forward(run, entry, first))
        else:
            alone(self._backward(run, entry, first))

    def _first_of_pair(self, run: _Run, action: Action, tensor: torch.Tensor | None) -> Steps[None]:
        """Do the forward, and send its result at once, to travel while the backward computes.

        Without tags a message must keep its place among the others: it goes early only if nothing comes before it.
        """
        yield from self._forward(run, action, tensor)
        message = run.program.outbox.get(action)
        if message is not None and (run.following == Send(message) or not self._connected.needs_order([message])):
            self._send(run, message)

    def _second_of_pair(self, run: _Run, action: Action) -> Steps[None]:
        """Do the backward; the gradient that it takes may still travel while the forward begins."""
        yield from self._backward(run, action, self._input(run, action))

    @property
    def _connected(self) -> Transport:
        assert self._transport is not None, "a pipeline of one rank has no messages"
        return self._transport

    def _steps(self, program: Program) -> tuple[Step, ...]:
        steps = program.steps[self.rank]
        if self._transport is None:
            return steps
        received = [step.message for step in steps if isinstance(step, Receive)]
        if self._transport.needs_order(received):
            return steps
        if program not in self._early:
            self._early[program] = post_early(steps, self.lookahead)
        return self._early[program]

    def _send(self, run: _Run, message: Message) -> None:
        if message in run.sent:
            return
        run.sent.add(message)
        result = run.results.pop(message.producer)
        if result is not None:
            self._connected.send(message, result)
        if run.recorder is not None:
            run.recorder.sent(message)

    def _input(self, run: _Run, action: Action) -> torch.Tensor | None:
        message = run.program.inbox.get(action)
        if message is not None:
            started = None if run.recorder is None else run.recorder.now()
            tensor = self._connected.receive(message)
            if run.recorder is not None:
                run.recorder.received(message, started)
            return tensor
        source = run.program.schedule.input_of(action)
        return None if source is None else run.results.pop(source)

    def _segments(self, run: _Run, action: Action) -> Sequence[Segment]:
        stage = self.stages[action.stage]
        if run.cut and isinstance(stage, Cuttable):
            return stage.segments(action.micro_batch)

        def whole(tensor: torch.Tensor | None) -> tuple[torch.Tensor]:
            output = stage(tensor, action.micro_batch)
            if not isinstance(output, torch.Tensor):
                raise ConfigError(f"stage {action.stage} must return one tensor, not {type(output).__name__}")
            return (output,)

        return [Segment(whole)]

    def _forward(self, run: _Run, action: Action, tensor: torch.Tensor | None) -> Steps[None]:
        schedule = run.program.schedule
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        is_last = action.stage == schedule.num_stages - 1
        train = not schedule.forward_only
        segments = self._segments(run, action)
        output, trace = yield from forward_steps(segments, tensor, train, keep_output=is_last)
        if is_last:
            if train and output.numel() != 1:
                raise ConfigError(
                    "the last stage must return the scalar loss to run backward on, not a tensor of shape "
                    f"{list(output.shape)}"
                )
            if trace is not None and not trace.has_gradient:
                raise ConfigError(
                    f"the loss of micro-batch {action.micro_batch} does not depend on anything that is trained; was it "
                    "detached, or made of integers?"
                )
            run.outputs[action.micro_batch] = output
        else:
            run.results[action] = output
        if trace is None:
            self._in_flight -= 1
        else:
            run.forwarded[action.chunk] = trace

    def _backward(self, run: _Run, action: Action, gradient: torch.Tensor | None) -> Steps[None]:
        trace = run.forwarded.pop(action.chunk)
        split = action.kind == "I"
        if run.listener is not None:
            if action in run.last_backwards:
                run.listener.expect_last_backward(action.stage)
            if not split:
                run.listener.before_backward(action.stage)
        result = yield from backward_steps(trace, gradient, self.weights, action.chunk, split)
        if run.listener is not None and not split:
            run.listener.after_backward(action.stage)
        if action.stage > 0:
            run.results[action] = result
        self._in_flight -= 1

    def _weights(self, run: _Run, action: Action) -> None:
        """Compute the weights' gradients that the chunk's I put off."""
        if run.listener is not None:
            run.listener.before_backward(action.stage)
        num_products = self.weights.run(action.chunk)
        if run.listener is not None:
            run.listener.after_backward(action.stage)
        if not num_products and self._tells_of_empty:
            self._tells_of_empty = False
            _log.warning(
                "pipeline rank %d: W of stage %d has nothing to do, so its I takes as long as a whole backward: none of its "
                "layers puts off its weights' gradients, as the parallel layers do once attach_queue() has been called",
                self.rank,
                action.stage,
            )
