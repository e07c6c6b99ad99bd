"""The messages of a pipeline whose ranks share a host's memory (parallax/mail.py).

A send copies the tensor out, so nothing has to be kept, and no receive has to be posted. A message takes about half of the time
that it takes over gloo (benchmarks/collectives.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from parallax.errors import LostRank
from parallax.mail import Mail
from parallax.mesh import Group
from parallax.pipeline.lower import Message
from parallax.pipeline.transport import (
    ActivationSpec,
    Boundaries,
    GroupTransport,
    Transport,
    receiving,
    sending,
    telling,
)


class SharedTransport:
    """Messages through shared memory. spec: of all boundaries, if known beforehand."""

    def __init__(self, group: Group, mail: Mail, spec: ActivationSpec | None = None) -> None:
        self._group, self._mail, self._boundaries = group, mail, Boundaries(spec)
        self._step, self._is_over = 0, True

    def needs_order(self, messages: Iterable[Message]) -> bool:
        """Never: messages have tags."""
        return False

    def begin(self) -> None:
        """Give the step's messages a number, the same on all ranks, that none of another step has."""
        if not self._is_over:
            self._mail.forget(self._step)
        self._step, self._is_over = self._mail.begin_step(), False

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Send a stage's output or an input's gradient; raises ConfigError if its shape is not the agreed one."""
        self._boundaries.check(message, tensor)
        with telling(self._group, sending(message), LostRank):
            self._mail.send(message.target, self._tag(message), tensor)

    def post(self, message: Message) -> None:
        """Nothing has to be ready for a message."""

    def receive(self, message: Message) -> torch.Tensor | None:
        """Wait for a message and return it; None for a gradient that does not exist."""
        if self._boundaries.lacks_gradient(message):
            return None
        with telling(self._group, receiving(message), LostRank):
            return self._mail.receive(message.source, self._tag(message))

    def finish(self) -> None:
        """End the step: its messages have left when `send` returned."""
        self._is_over = True

    def _tag(self, message: Message) -> int:
        return self._step << 32 | message.index + 1


def make_transport(group: Group, device: torch.device, spec: ActivationSpec | None) -> Transport:
    """Return the fastest way between these ranks."""
    if group.shared_memory is not None and group.shared_memory.mail is not None and device.type == "cpu":
        return SharedTransport(group, group.shared_memory.mail, spec)
    return GroupTransport(group, device, spec)
