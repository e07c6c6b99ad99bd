"""Run any checked schedule on this rank's stages; it knows no schedule by name and no model.

    executor = PipelineExecutor(SCHEDULES["1f1b"](mesh.layout.pp, 8), mesh.pp, {mesh.pp_rank: stage}, spec)
    losses = executor.run()          # on the rank of the last stage; [] elsewhere

A stage is a function (input or None, micro_batch) -> output. The first gets None and finds its own input by the
micro-batch's number; the last returns, in training, the scalar to run backward on, scaled as the caller wants it. One
process with one stage runs the same loop: gradient accumulation.

What a rank keeps of a forward is its input and the edge of the autograd graph at its output. The output itself is gone
as soon as it has been sent, unless the stage's own backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallax.errors import ConfigError
from parallax.mesh import Group, rank_of, size_of
from parallax.pipeline.actions import Action, Pair, Schedule
from parallax.pipeline.check import check_schedule
from parallax.pipeline.lower import Message, Program, Receive, Send, Step, post_early
from parallax.pipeline.transport import ActivationSpec, GroupTransport, Transport

Stage = Callable[[torch.Tensor | None, int], torch.Tensor]


@dataclass
class _Forwarded:
    """What backward needs: the stage's input, and where its graph is entered (the loss itself on the last stage)."""

    input: torch.Tensor | None
    root: torch.Tensor | GradientEdge | None


@dataclass
class _Run:
    """The state of one step on one rank."""

    program: Program
    last_backwards: dict[Action, int]
    before_last_backward: Callable[[int], None] | None
    results: dict[Action, torch.Tensor | None] = field(default_factory=dict)  # until sent, or used by a stage here
    forwarded: dict[tuple[int, int, int], _Forwarded] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)


class PipelineExecutor:
    """Runs a schedule's actions for one rank.

    schedule: what `run` does when it is given nothing else.
    pp: the pipeline's ranks; None when this process holds all stages.
    stages: for each stage of this rank, its function.
    spec: shape and dtype of what stages hand on; None: the first step finds out, and is slower for it.
    lookahead: how many receives are posted beyond the one that is waited for.

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
        transport: Transport | None = None,
        lookahead: int = 2,
    ) -> None:
        self.rank, self.num_ranks, self.stages, self.lookahead = rank_of(pp), size_of(pp), dict(stages), lookahead
        self.peak_in_flight = 0
        self._in_flight = 0
        self._early: WeakKeyDictionary[Program, tuple[Step, ...]] = WeakKeyDictionary()
        if transport is None and pp is not None:
            transport = GroupTransport(pp, torch.device(device), spec)
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
        for entry in schedule.order[self.rank]:
            if isinstance(entry, Pair):
                raise ConfigError(
                    f"schedule {schedule.name} does {entry} together; the executor runs one action after the other only"
                )
            if entry.kind in ("I", "W"):
                raise ConfigError(
                    f"schedule {schedule.name} splits the backward ({entry}); the executor runs whole backwards (B) only"
                )
        return check_schedule(schedule)

    def run(
        self, program: Program | None = None, before_last_backward: Callable[[int], None] | None = None
    ) -> list[torch.Tensor]:
        """Do one step; called by every rank of the pipeline with the same program.

        before_last_backward: called with a stage right before the backward that completes its gradients.
        Returns the last stage's outputs, detached, in the order of the micro-batches; [] on other ranks.
        Raises RuntimeError, naming the action, if another rank is gone.
        """
        walk = self.walk(program, before_last_backward)
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return end.value

    def walk(
        self, program: Program | None = None, before_last_backward: Callable[[int], None] | None = None
    ) -> Generator[Step, None, list[torch.Tensor]]:
        """Do the same step by step: yields each step just before it is done."""
        program = program or self.program
        run = _Run(program, program.schedule.last_backwards(self.rank), before_last_backward)
        self._in_flight = self.peak_in_flight = 0
        for step in self._steps(program):
            yield step
            if isinstance(step, Receive):
                self._connected.post(step.message)
            elif isinstance(step, Send):
                self._send(run, step.message)
            else:
                assert isinstance(step, Action), f"{step} was not refused"
                self._forward(run, step) if step.kind == "F" else self._backward(run, step)
        if self._transport is not None:
            self._transport.finish()
        return [run.outputs[number] for number in sorted(run.outputs)]

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
        result = run.results.pop(message.producer)
        if result is not None:
            self._connected.send(message, result)

    def _input(self, run: _Run, action: Action) -> torch.Tensor | None:
        message = run.program.inbox.get(action)
        if message is not None:
            return self._connected.receive(message)
        source = run.program.schedule.input_of(action)
        return None if source is None else run.results.pop(source)

    def _forward(self, run: _Run, action: Action) -> None:
        schedule = run.program.schedule
        self._in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
        tensor = self._input(run, action)
        if tensor is not None and not schedule.forward_only and _has_gradient(tensor):
            tensor.requires_grad_()
        output = self.stages[action.stage](tensor, action.micro_batch)
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"stage {action.stage} must return one tensor, not {type(output).__name__}")
        is_last = action.stage == schedule.num_stages - 1
        if is_last:
            run.outputs[action.micro_batch] = output.detach()
        else:
            run.results[action] = output.detach()
        if schedule.forward_only:
            self._in_flight -= 1
            return
        if is_last and output.numel() != 1:
            raise ConfigError(
                f"the last stage must return the scalar loss to run backward on, not a tensor of shape {list(output.shape)}"
            )
        root = output if is_last else get_gradient_edge(output) if output.requires_grad else None
        run.forwarded[action.chunk] = _Forwarded(tensor, root)

    def _backward(self, run: _Run, action: Action) -> None:
        forwarded = run.forwarded.pop(action.chunk)
        gradient = self._input(run, action)
        if action in run.last_backwards and run.before_last_backward is not None:
            run.before_last_backward(run.last_backwards[action])
        if forwarded.root is not None:  # None: nothing in this stage or before it is trained
            torch.autograd.backward(forwarded.root, gradient)
        tensor = forwarded.input
        if action.stage > 0:
            run.results[action] = None if tensor is None or not tensor.requires_grad else _gradient_of(tensor)
        self._in_flight -= 1


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a stage's input; zeros if its output did not depend on it, since the sender waits for it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
