"""Point-to-point messages between the ranks of a pipeline: sends that never block, receives posted ahead.

Three ways, by what the ranks have between them:

    memory  ranks of one host on CPUs (parallax/pipeline/shared_transport.py): a send is a copy, found by its tag.
    gloo    each message has its tag, so receives are posted in any order, as early as the executor likes. Bytes move
            in the background once the receive is posted, and not before.
    NCCL    no tags: both ends issue their operations in the one order that lowering gives. Forward and backward
            messages have a communicator each, so that neither direction queues behind the other.

A received tensor is the buffer it arrived in and belongs to the caller. A sent tensor is kept until it has left. gloo
does not tell when that is without blocking; but who gets a message from a rank knows how far that rank had come when it
sent it, and so which earlier messages it must have received (`Message.made_at`, `used_at`).

Shapes: an `ActivationSpec` given by the caller holds for all stages. Without one the first message over each boundary
is preceded by a header that says its shape and dtype, which then stay the same. A gradient has the shape and dtype of
its activation; activations that are not floating point have none, and nothing is sent for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from parallax.collectives import backend_reason
from parallax.dtypes import DTYPES
from parallax.errors import ConfigError, LostRank
from parallax.mail import MAX_DIMS
from parallax.mesh import Group
from parallax.pipeline.lower import Message

_HEADER_LENGTH = 2 + MAX_DIMS  # dtype, number of dims, dims


@dataclass(frozen=True)
class ActivationSpec:
    """Shape and dtype of what one stage hands to the next, for one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether gradients flow back over a boundary with such activations."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class Transport(Protocol):
    """How the executor moves the messages of a program."""

    def needs_order(self, messages: Iterable[Message]) -> bool:
        """Whether receives of `messages` must be posted in the lowered order; otherwise any earlier moment is better."""
        ...

    def begin(self) -> None:
        """A step begins, on all ranks in the same order."""
        ...

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start to send `tensor`; never blocks."""
        ...

    def post(self, message: Message) -> None:
        """Start to receive."""
        ...

    def receive(self, message: Message) -> torch.Tensor | None:
        """Wait for a posted message and return it; None for a gradient that does not exist."""
        ...

    def finish(self) -> None:
        """Return when every send of the step is over."""
        ...


class Boundaries:
    """What is handed on over each boundary between stages: the same shape and dtype in every micro-batch and step."""

    def __init__(self, spec: ActivationSpec | None) -> None:
        self._spec = spec
        self._learned: dict[tuple[int, int], ActivationSpec] = {}

    def spec_of(self, message: Message) -> ActivationSpec | None:
        """Return what is known of the messages over this boundary."""
        return self._spec or self._learned.get(message.boundary)

    def learn(self, message: Message, spec: ActivationSpec) -> None:
        """Note what the first message over a boundary is."""
        self._learned[message.boundary] = spec

    def check(self, message: Message, tensor: torch.Tensor) -> None:
        """Learn from the first message over a boundary; raises ConfigError if a later one is not like it."""
        spec, known = ActivationSpec(tuple(tensor.shape), tensor.dtype), self.spec_of(message)
        if known is None:
            is_dense = tensor.layout == torch.strided
            if spec.dtype not in DTYPES or len(spec.shape) > MAX_DIMS or not is_dense:
                raise ConfigError(
                    f"a stage returned {'' if is_dense else 'sparse '}{list(spec.shape)} {spec.dtype}; stages can hand on dense "
                    f"tensors of at most {MAX_DIMS} dims of {', '.join(str(dtype) for dtype in DTYPES)}"
                )
            self.learn(message, spec)
        elif spec != known:
            raise ConfigError(
                f"the result of {message.producer} is {list(spec.shape)} {spec.dtype}, but the pipeline passes on "
                f"{list(known.shape)} {known.dtype} there; every micro-batch and step must have the same shape"
            )

    def lacks_gradient(self, message: Message) -> bool:
        """Whether this is the gradient of something that has none, so that nothing is sent."""
        spec = self.spec_of(message)
        return message.is_gradient and spec is not None and not spec.has_gradient


class GroupTransport:
    """Messages over a process group: gloo on a CPU, NCCL on a GPU.

    spec: of all boundaries, if known beforehand. tagged: whether to match messages by tag; by default, on a CPU.
    """

    def __init__(
        self, group: Group, device: torch.device, spec: ActivationSpec | None = None, tagged: bool | None = None
    ) -> None:
        assert group.process_group is not None, f"{group} was planned without processes and cannot communicate"
        self._group, self._device, self._boundaries = group, device, Boundaries(spec)
        self._tagged = device.type == "cpu" if tagged is None else tagged
        self._forward_group = group.process_group
        self._backward_group = group.backward_process_group or group.process_group
        self._arriving: dict[Message, tuple[torch.Tensor, Any]] = {}
        self._leaving: list[tuple[Message, torch.Tensor, Any]] = []

    def needs_order(self, messages: Iterable[Message]) -> bool:
        """Say yes without tags, and while a header has to be waited for before a receive can be posted."""
        return not self._tagged or any(self._boundaries.spec_of(message) is None for message in messages)

    def begin(self) -> None:
        """Nothing has to be done."""

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start to send a stage's output or an input's gradient; raises ConfigError if its shape is not the agreed one."""
        is_new = self._boundaries.spec_of(message) is None
        self._boundaries.check(message, tensor)
        with telling(self._group, sending(message)):
            if is_new:
                self._start_send(message, _encode(tensor), header=True)
            # On a CPU a copy, for a stage may write to its output again; on a GPU what writes later waits its turn.
            if self._device.type == "cpu":
                tensor = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
            self._start_send(message, tensor.contiguous())
        self._release(lambda sent: False)

    def post(self, message: Message) -> None:
        """Start to receive; waits for the header if the shape is not known yet."""
        with telling(self._group, receiving(message)):
            spec = self._boundaries.spec_of(message)
            if spec is None:
                header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
                self._start_receive(message, header, header=True).wait()
                spec = _decode(header)
                self._boundaries.learn(message, spec)
            if self._boundaries.lacks_gradient(message):
                return
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            self._arriving[message] = (buffer, self._start_receive(message, buffer))

    def receive(self, message: Message) -> torch.Tensor | None:
        """Wait for a posted message; on a GPU it is the current stream that waits."""
        if message not in self._arriving:
            assert self._boundaries.lacks_gradient(message), f"{message} was not posted"
            return None
        buffer, work = self._arriving.pop(message)
        with telling(self._group, receiving(message)):
            work.wait()
        self._release(lambda sent: sent.target == message.source and sent.used_at < message.made_at)
        return buffer

    def finish(self) -> None:
        """Wait for all sends; on a GPU the current stream waits, so that their memory may be used again."""
        self._release(lambda sent: True)

    def _release(self, is_over: Any) -> None:
        """Let go of sent tensors; for those that `is_over` knows to have been received, waiting takes no time."""
        kept = []
        for message, tensor, work in self._leaving:
            if is_over(message):
                with telling(self._group, sending(message)):
                    work.wait()
            elif not work.is_completed():
                kept.append((message, tensor, work))
        self._leaving = kept

    def _start_send(self, message: Message, tensor: torch.Tensor, header: bool = False) -> None:
        tag = self._tag(message, header)
        work = dist.isend(tensor, group=self._channel(message), group_dst=message.target, tag=tag)
        self._leaving.append((message, tensor, work))

    def _start_receive(self, message: Message, buffer: torch.Tensor, header: bool = False) -> Any:
        tag = self._tag(message, header)
        return dist.irecv(buffer, group=self._channel(message), group_src=message.source, tag=tag)

    def _tag(self, message: Message, header: bool) -> int:
        return 2 * message.index + header if self._tagged else 0

    def _channel(self, message: Message) -> dist.ProcessGroup:
        return self._backward_group if message.is_gradient else self._forward_group


@contextmanager
def telling(group: Group, doing: str, failure: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Say in a failed communication's message which process was doing what. failure: what it raises if a rank is lost."""
    journal = group.journal
    if journal is not None:
        journal.begin(doing, group.name, 0, None)
    try:
        yield
        if journal is not None:
            journal.end()
    except failure as error:
        here = group.rank
        reason = backend_reason(error)
        raise LostRank(f"rank {group.ranks[here]} (pipeline rank {here}): while {doing}: {reason}") from error


def sending(message: Message) -> str:
    return f"sending the result of {message.producer} to pipeline rank {message.target}"


def receiving(message: Message) -> str:
    return f"receiving the input of {message.consumer} from pipeline rank {message.source}"


def _encode(tensor: torch.Tensor) -> torch.Tensor:
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)), device=tensor.device)


def _decode(header: torch.Tensor) -> ActivationSpec:
    dtype, dims, *shape = header.tolist()
    return ActivationSpec(tuple(shape[:dims]), DTYPES[dtype])
