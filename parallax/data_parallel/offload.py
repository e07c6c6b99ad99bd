"""Optimizer states in the host's memory (Ren et al. 2021, arXiv:2101.06840, keep them there too, and update them there).

Here the device updates them as ever, to the same bits: a region's states come to it, are updated, and go back, while the next
region's are already on their way and the last one's still on theirs.

    to the device     region 0 | region 1 | region 2 | region 3 | ...
    update                     | region 0 | region 1 | region 2 | ...
    to the host                           | region 0 | region 1 | ...

Two sets of buffers on the device take turns, so regions are small. What is copied for an element: its states both ways, and where
the model is not fp32 its main parameter, which is rounded into the model's on the device. Of this, what follows the update hides
nothing but the last region's way back.

On a CPU there is no other memory; `make_offloaded` then leaves all as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from parallax.data_parallel.rules import Region, Rule, Update

REGION_ELEMENTS = 4 << 20  # 16 MiB of fp32 for each state: the copies' latency is small beside that


class Copies(Protocol):
    """Copies between the host and the device, in the order in which they are begun, beside what is computed."""

    def begin(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after_computing: bool) -> Any:
        """Begin to copy; return what to wait for. after_computing: not before what was computed so far is done."""

    def wait(self, copies: Any) -> None:
        """Let what is computed next wait for them."""

    def finish(self) -> None:
        """Return when all that was begun is done, for whoever reads the host's memory."""


class StreamCopies:
    """Copies in a stream of their own; the host's memory is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after_computing: bool) -> Any:
        if after_computing:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copies: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(copies)

    def finish(self) -> None:
        self._stream.synchronize()


@dataclass(eq=False)
class _Buffers:
    """Memory on the device for the states of one region at a time, and for its main parameters."""

    states: dict[str, torch.Tensor]
    main_param: torch.Tensor | None


class Offloaded:
    """A rule whose regions keep their states on the host; see `parallax.data_parallel.rules.Rule`.

    Works for rules that treat each region for itself, as AdamW and SGD do.
    """

    def __init__(self, rule: Rule, copies: Copies) -> None:
        self.rule, self.copies = rule, copies
        self._buffers: list[_Buffers] = []

    @property
    def states(self) -> Sequence[str]:
        return self.rule.states

    def update(self, regions: Sequence[Region], update: Update) -> None:
        """Update the regions in turn; their states and parameters are on the host when `copies.finish()` returns."""
        if not regions:
            return
        if not self._buffers:
            self._buffers = [_make_buffers(regions) for _ in range(2)]
        coming = self._fetch(regions[0], 0)
        for number, region in enumerate(regions):
            here, arriving = coming
            if number + 1 < len(regions):
                coming = self._fetch(regions[number + 1], number + 1)
            self.copies.wait(arriving)
            self.rule.update([here], update)
            if here.main_param is not region.main_param:
                region.bucket.values(slice(region.start, region.stop)).copy_(here.main_param)
            self.copies.begin(_moved(region), _moved(here), after_computing=True)

    def _fetch(self, region: Region, number: int) -> tuple[Region, Any]:
        """Begin to bring a region to the device; copies are in order, so its buffers have been read out by then."""
        buffers, size = self._buffers[number % 2], region.stop - region.start
        here = replace(region, states={name: state[:size] for name, state in buffers.states.items()})
        if buffers.main_param is not None:
            here = replace(here, main_param=buffers.main_param[:size])
        return here, self.copies.begin(_moved(here), _moved(region), after_computing=False)


def _moved(region: Region) -> list[torch.Tensor]:
    """Return the tensors of a region that have their place on the host."""
    own = [region.main_param] if region.bucket.has_own_main_params else []
    return [*region.states.values(), *own]


def _make_buffers(regions: Sequence[Region]) -> _Buffers:
    first, most = regions[0], max(region.stop - region.start for region in regions)
    device = first.main_grad.device
    states = {name: torch.empty(most, dtype=state.dtype, device=device) for name, state in first.states.items()}
    own = first.bucket.has_own_main_params
    return _Buffers(states, torch.empty(most, dtype=first.main_param.dtype, device=device) if own else None)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory, pinned where that matters."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
