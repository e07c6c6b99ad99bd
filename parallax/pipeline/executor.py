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
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from parallax.errors import ConfigError, LostRank
from parallax.journal import Journal
from parallax.mesh import Group, rank_of, size_of
from parallax.pipeline.actions import Action, Entry, Pair, Schedule
from parallax.pipeline.check import check_schedule
from parallax.pipeline.chunks import BackwardListener, Chunks, Stage, tell_of_empty
from parallax.pipeline.lower import Message, Program, Receive, Send, Step, post_early
from parallax.pipeline.recorder import Recorder
from parallax.pipeline.segments import Steps, alone, in_turn
from parallax.pipeline.shared_transport import make_transport
from parallax.pipeline.transport import ActivationSpec, Transport
from parallax.tensor_parallel.weight_gradients import WeightQueue


@dataclass
class _Run:
    """The state of one step on one rank."""

    program: Program
    chunks: Chunks
    recorder: Recorder | None
    results: dict[Action, torch.Tensor | None] = field(default_factory=dict)  # until sent, or used by a stage here
    sent: set[Message] = field(default_factory=set)  # before their turn
    following: Step | None = None  # what comes after the step that is being done


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
        chunks = Chunks(program.schedule, self.rank, self.stages, self.weights, listener)
        run = _Run(program, chunks, recorder)
        self.weights.clear()
        if self._transport is not None:
            self._transport.begin()
        return self._walk(run)

    def _walk(self, run: _Run) -> Generator[Step, None, list[torch.Tensor]]:
        steps = self._steps(run.program)
        for place, step in enumerate(steps):
            run.following = steps[place + 1] if place + 1 < len(steps) else None
            yield step
            self._do(run, step)
        if self._transport is not None:
            self._transport.finish()
        self.peak_in_flight = run.chunks.peak_in_flight
        outputs = run.chunks.outputs
        return [outputs[number] for number in sorted(outputs)]

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
            self._weight_gradients(run, entry)
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

    def _forward(self, run: _Run, action: Action, tensor: torch.Tensor | None) -> Steps[None]:
        result = yield from run.chunks.forward(action, tensor)
        if action.stage < run.program.schedule.num_stages - 1:
            run.results[action] = result

    def _backward(self, run: _Run, action: Action, gradient: torch.Tensor | None) -> Steps[None]:
        result = yield from run.chunks.backward(action, gradient)
        if action.stage > 0:
            run.results[action] = result

    def _weight_gradients(self, run: _Run, action: Action) -> None:
        if not run.chunks.weight_gradients(action) and self._tells_of_empty:
            self._tells_of_empty = False
            tell_of_empty(self.rank, action.stage)
