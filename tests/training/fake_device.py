"""A device that computes nothing and works late, as a GPU does: what the host would have to wait for shows.

Tensors are fake ones of torch (shapes without values) on a device of another type than the host's. Whoever asks for a value, or for
a shape that depends on values, gets an exception; a copy between the host and the device that waits is noted. Communication goes
over torch's `fake` backend, whose other ranks do not exist. The first step may wait: it fills caches.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from parallax.mesh import Layout, Mesh
from parallax.models.packed_rows import PackedRows
from parallax.training.step import TrainStep

_ROOT = str(Path(__file__).parents[2])


class _Copies(TorchDispatchMode):
    """Notes copies between host and device that wait; values do not matter, so none is made."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name, device = func.overloadpacket.__name__, kwargs.get("device")
        if name == "_to_copy" and device is not None and torch.device(device).type != args[0].device.type:
            if not kwargs.get("non_blocking"):
                self.note(f"a copy {args[0].device.type} -> {torch.device(device).type}")
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device)
        if name == "copy_" and args[0].device.type != args[1].device.type:
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self.note(f"a copy {args[1].device.type} -> {args[0].device.type}")
            return args[0]
        return func(*args, **kwargs)

    def note(self, what: str) -> None:
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_ROOT)]
        frame = next(frame for frame in reversed(ours) if frame.filename != __file__)
        self.waits.append(f"{what} in {Path(frame.filename).name}: {frame.line}")


class _Late(_DummyBackendModule):
    """What torch asks a device's module for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _on_host(function: Callable) -> Callable:
    """Return a function of what is on the host, whose tensors are real."""

    def call(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return call


def prepare() -> None:
    """Make the device and its other ranks; changes this process for good."""
    import parallax.precision.backends.choose
    import parallax.training.build  # and with it all that asks other ranks for something
    import parallax.training.step

    _setup_privateuseone_for_python_backend("late", _Late())
    for name, module in list(sys.modules.items()):
        if name.startswith("parallax.") and hasattr(module, "gather_json"):
            vars(module)["gather_json"] = lambda value, group, device=None: (
                [value] * (1 if group is None else group.size)
            )
    parallax.training.step.work_of = _on_host(parallax.training.step.work_of)
    PackedRows.from_batch = _on_host(PackedRows.from_batch)  # type: ignore[method-assign]


def waits_of(function: Callable[[], Any]) -> list[str]:
    """Return what the host waits for in a function; called inside of a FakeTensorMode."""
    with _Copies() as copies:
        try:
            function()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            copies.note(str(error.func))
        except NotImplementedError:  # torch.tensor(values, device=...) is a copy that no mode sees
            copies.note("a new tensor on the device")
    return copies.waits


def waits_of_a_step(
    layout: Layout, build: Callable[[Mesh], TrainStep], batches_of: Callable[[Mesh], Sequence[Mapping]]
) -> list[str]:
    """Return what the host waits for in the second step, up to its numbers on the device."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            mesh = Mesh(layout, 0, torch.device("late", 0), connected=layout.world_size > 1, shared_memory=False)
            with unset_fake_temporarily():
                batches = batches_of(mesh)
            with _Copies():
                step = build(mesh)
                step(batches, 1e-3)
            return waits_of(lambda: step(batches, 1e-3).numbers())
    finally:
        dist.destroy_process_group()
