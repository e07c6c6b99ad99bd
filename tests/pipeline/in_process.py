"""All ranks of a pipeline in one process: a transport that is a dictionary, and a driver that takes ranks in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch

from parallax.mesh import Group
from parallax.pipeline.actions import Action, Pair, Schedule
from parallax.pipeline.executor import PipelineExecutor
from parallax.pipeline.lower import Message, Program
from parallax.tensor_parallel.weight_gradients import WeightQueue


class Mailbox:
    """A transport over which a message is there as soon as it is sent; one is shared by all ranks."""

    def __init__(self) -> None:
        self.sent: dict[Message, torch.Tensor] = {}
        self.log: list[str] = []
        self.without_gradient: set[tuple[int, int]] = set()

    def needs_order(self, messages: Iterable[Message]) -> bool:
        return False

    def begin(self) -> None:
        pass

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        assert message not in self.sent
        self.sent[message] = tensor.clone()
        self.log.append(str(message.producer))
        if not tensor.is_floating_point():
            self.without_gradient.add(message.boundary)

    def post(self, message: Message) -> None:
        pass

    def never_comes(self, message: Message) -> bool:
        return message.is_gradient and message.boundary in self.without_gradient

    def is_there(self, message: Message) -> bool:
        return message in self.sent or self.never_comes(message)

    def receive(self, message: Message) -> torch.Tensor | None:
        return None if self.never_comes(message) else self.sent.pop(message)

    def finish(self) -> None:
        pass


def executors_in_process(
    schedule: Schedule, stages: dict[int, Callable], weights: list[WeightQueue] | None = None
) -> list[PipelineExecutor]:
    """Return an executor for each rank of `schedule`, connected by a mailbox. weights: their queues."""
    mailbox = Mailbox()
    ranks = tuple(range(schedule.num_ranks))
    return [
        PipelineExecutor(
            schedule,
            Group("pp", ranks, rank) if schedule.num_ranks > 1 else None,
            {stage: stages[stage] for stage in schedule.stages_of(rank)},
            transport=mailbox,
            weights=None if weights is None else weights[rank],
        )
        for rank in ranks
    ]


def run_in_process(
    executors: list[PipelineExecutor], program: Program | None = None, seed: int = 0
) -> tuple[list[Any], list[int]]:
    """Do one step on all ranks, one step of a random rank at a time, never one that would have to wait.

    Returns each rank's outputs, and the ranks that could not come to their end.
    """
    random = Random(seed)
    program = program or executors[0].program
    walks = {executor.rank: executor.walk(program) for executor in executors}
    current = {rank: next(walk) for rank, walk in walks.items()}
    outputs: list[Any] = [None] * len(executors)
    mailbox = executors[0]._transport
    assert isinstance(mailbox, Mailbox)

    def would_wait(rank: int) -> bool:
        step = current[rank]
        parts = step.parts if isinstance(step, Action | Pair) else ()
        return any(part in program.inbox and not mailbox.is_there(program.inbox[part]) for part in parts)

    while ready := [rank for rank in current if not would_wait(rank)]:
        rank = random.choice(ready)
        try:
            current[rank] = next(walks[rank])
        except StopIteration as end:
            outputs[rank] = end.value
            del current[rank]
    return outputs, sorted(current)
