"""Save while training goes on: it stops only for a copy in this host's memory, and a thread writes that.

    saver = BackgroundSaver("runs/tiny/checkpoints", parts, mesh)      # all ranks; plans once, and makes the copy's buffers
    saver.save(100)                                                    # returns when the tensors may be changed
    saver.wait()                                                       # returns when step 100 is on the disk

The ranks' threads talk over a group of their own, through the host's memory: neither collectives of the training nor the GPU
get into their way. Only what a rank sends or writes is copied, so replicas share that memory as they share the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.plan import ROUND_BYTES
from parallax.checkpoint.save import make_plan, small_files, write
from parallax.checkpoint.transfer import LocalTensors, Snapshot
from parallax.collectives import gather_json
from parallax.mesh import Group, Mesh
from parallax.storage import Location, location


@dataclass(frozen=True)
class _Threads:
    """All ranks' threads, as `agreement.Ranks`."""

    rank: int
    world: Group | None
    device: torch.device


class BackgroundSaver:
    """Saves one run under `folder`, one checkpoint at a time; made, and all methods called, by all ranks.

    after: called on rank 0, in the thread, with the step of each checkpoint that has become complete. group: of all ranks, for the
    threads alone, of `Mesh.make_host_group`; None makes one, which takes the store through which the ranks found each other.

    peak_bytes: the most memory that any rank needs for it beside the run.
    """

    def __init__(
        self,
        folder: str | Location,
        parts: CheckpointParts,
        mesh: Mesh,
        after: Callable[[int], None] | None = None,
        group: Group | None = None,
    ) -> None:
        self._folder, self._parts, self._after = location(folder), parts, after
        self._plan = make_plan(parts, mesh)
        self._ranks = _Threads(mesh.rank, group or mesh.make_host_group("saves"), torch.device("cpu"))
        self._copy = Snapshot(parts, self._plan.units(), mesh.rank)
        # Of a round: what is sent, what is put together, and what it came in.
        most = max((unit.num_bytes for unit in self._plan.units()), default=0)
        needed = self._copy.num_bytes + 2 * max(min(ROUND_BYTES, self._copy.num_bytes), most)
        self.peak_bytes = max(gather_json(needed, mesh.world, mesh.device))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether this rank's thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int) -> None:
        """Begin to save the run as it is, after the save before; raises what that one failed with."""
        self.wait()
        content = small_files(step, self._parts)
        self._copy.take(LocalTensors(self._parts))
        self._thread = threading.Thread(target=self._write, args=(step, content), name=f"save {step}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when what was begun is on the disk.

        Raises ConfigError, the same on all ranks, when it could not be written; nothing is left of it then.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, content: dict[str, bytes]) -> None:
        try:
            write(self._folder, step, content, self._parts, self._plan, self._copy, self._ranks)
            if self._after is not None and self._ranks.rank == 0:
                self._after(step)
        except BaseException as error:
            self._error = error  # `wait` raises it where someone can do something about it
