"""When a run saves and from where it starts: the trainer's side of parallax.checkpoint."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from parallax.checkpoint.agreement import together
from parallax.checkpoint.background import BackgroundSaver
from parallax.checkpoint.find import find_latest, finished
from parallax.checkpoint.load import load, read_state
from parallax.checkpoint.names import MANIFEST, STATE, step_of
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.place import remove
from parallax.checkpoint.retention import replaced_checkpoints
from parallax.checkpoint.save import SavePlan, make_plan, save
from parallax.collectives import gather_json
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.precision.scales import gather_scales
from parallax.storage import Location, location
from parallax.training.run_lock import RunLock
from parallax.training.safety import SafetyOptions
from parallax.training.state import TrainState

# What this run is: its configuration and the fingerprints of its data and tokenizer; stored with each checkpoint.
Identity = dict[str, Any]
# Given what a checkpoint's run was and what this one is, a sentence for each thing that keeps one from continuing the other.
Compare = Callable[[Identity, Identity], list[str]]


def agree(identity: Identity, mesh: Mesh) -> None:
    """Raise ConfigError on all ranks, naming the rank and the option, if they were not all asked for the same."""
    rows = gather_json(hashlib.sha256(json.dumps(identity).encode()).hexdigest(), mesh.world, mesh.device)
    if len(set(rows)) == 1:
        return
    rows = gather_json(identity, mesh.world, mesh.device)
    for rank, row in enumerate(rows):
        for name, value, first in _differences(row, rows[0]):
            raise ConfigError(
                f"rank {rank} has {name} {value}, rank 0 has {first}; give all ranks the same command and files"
            )


def _differences(row: Identity, first: Identity) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, value of the first) of what differs in two identities."""
    # What the options came to says more than what was asked for, where one of two was left to its default.
    for part in sorted(row.keys() | first.keys(), key=lambda part: (part != "resolved", part)):
        mine, other = row.get(part), first.get(part)
        if not isinstance(mine, dict) or not isinstance(other, dict):
            if mine != other:
                yield f"the {part}", mine, other
            continue
        for name in sorted(mine.keys() | other.keys()):
            if mine.get(name) != other.get(name):
                flag = f"--{name.replace('_', '-')}" if part in ("options", "resolved") else f"the {part}'s {name}"
                yield flag, mine.get(name), other.get(name)


@dataclass(frozen=True)
class Resume:
    """What `--resume` was given, where the run's checkpoints are, and what tells whether one is of this run."""

    choice: str  # auto, none or a path
    root: Location
    identity: Identity
    compare: Compare

    def find(self, mesh: Mesh, older_than: int | None = None) -> Location | None:
        """Return the checkpoint to go on from, or None for a fresh start; called by all ranks, before a model is built.

        Raises ConfigError, the same on all ranks, if going on from there would not continue the run that was saved.
        """
        newest = find_latest(self.root, mesh, older_than, _warn)
        if newest is None and older_than is None and (damaged := self._damaged(mesh)):
            raise ConfigError(
                f"{self.root} holds the checkpoint{'s' * (len(damaged) > 1)} {', '.join(damaged[:3])}"
                f"{' and older ones' * (len(damaged) > 3)}, and none is whole; a new run there would overwrite them: "
                f"see parallax checkpoint verify, move them away, or give another --out"
            )
        if self.choice == "none":
            if newest is not None:
                raise ConfigError(
                    f"--resume none would mix a new run with the checkpoints in {self.root}; give another --out"
                )
            return None
        start = newest if self.choice == "auto" else location(self.choice)
        if start is None:
            return None
        try:
            step, stored = together(lambda: _read_training(start), mesh, f"reading {start}")
        except ConfigError as error:
            return self._older(start, error, mesh)
        if newest is not None and step_of(newest) > step:
            raise ConfigError(
                f"--resume {start} would overwrite the newer checkpoints in {self.root}, up to {newest.name}; give another --out"
            )
        if not {"identity", "counters"} <= stored.keys():
            raise ConfigError(f"{start} was not saved by pretrain.py; give --resume none or the path of one that was")
        problems = self.compare(stored["identity"], self.identity)
        if problems:
            hint = "give it as it was, or another --out for a new run"
            raise ConfigError([f"{start} is of another run: {problem}; {hint}" for problem in problems])
        return start

    def _damaged(self, mesh: Mesh) -> list[str]:
        """Return the names of the checkpoints that there are, where none can be used; called by all ranks."""
        found = together(lambda: finished(self.root) if mesh.rank == 0 else [], mesh, f"searching {self.root}")
        return gather_json(found, mesh.world, mesh.device)[0]

    def restore(self, start: Location | None, parts: CheckpointParts, mesh: Mesh) -> tuple[Location | None, TrainState]:
        """Load weights, optimizer states and counters in place; return from where, and the counters. Called by all ranks.

        `auto` goes on from the one before a damaged checkpoint, with a notice; with a path the run ends.
        """
        while start is not None:
            try:
                return start, _restored(start, parts, mesh)
            except ConfigError as error:
                start = self._older(start, error, mesh)
        return None, TrainState()

    def _older(self, damaged: Location, error: ConfigError, mesh: Mesh) -> Location:
        older = self.find(mesh, step_of(damaged)) if self.choice == "auto" else None
        if older is None:
            raise error
        if mesh.rank == 0:
            _warn(f"{error}; going on from {older}")
        return older


def _restored(path: Location, parts: CheckpointParts, mesh: Mesh) -> TrainState:
    training = load(path, parts, mesh)["training"]

    def load_scales() -> None:
        if parts.scales is None:
            return
        try:
            parts.scales.load_dict(training["fp8"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"{path / STATE} has no scales for this run's FP8 layers ({error})") from None

    together(load_scales, mesh, "reading the scales of FP8")
    return TrainState.from_dict(training["counters"])


def _read_training(path: Location) -> tuple[int, dict[str, Any]]:
    """Return a checkpoint's step, and what the trainer keeps in it."""
    for root in (path / "checkpoints", path):
        if not (path / MANIFEST).exists() and (newest := find_latest(root)) is not None:
            raise ConfigError(
                f"{path} is a run and no checkpoint; give --resume {newest}, or --out {newest.parent.parent}"
            )
    state = read_state(path)
    if "counters" in state["training"]:
        counters = TrainState.from_dict(state["training"]["counters"])
        if counters.step != state["step"]:
            raise ConfigError(f"{path / STATE} is of step {state['step']}, and its counters are of {counters.step}")
    return state["step"], state["training"]


def _warn(text: str) -> None:
    print(f"parallax: {text}", file=sys.stderr)


class Checkpoints:
    """The checkpoints of a run that is under way, as `fit` uses them; made, and all methods called, by all ranks.

    safety: which checkpoints stay, and whether training goes on while one is written. lock: of the run's folder. say: tells
    notices, on one rank.
    """

    def __init__(
        self,
        root: Location,
        parts: CheckpointParts,
        identity: Identity,
        mesh: Mesh,
        safety: SafetyOptions,
        lock: RunLock,
        say: Callable[[str], None] = print,
    ) -> None:
        self._root, self._parts, self._identity, self._mesh = root, parts, identity, mesh
        self._safety, self._lock, self._say = safety, lock, say
        self._saver: BackgroundSaver | None = None
        self._plan: SavePlan | None = None  # where there is no saver, which has one
        # Before the first step: the launcher, which has what new groups need, may be gone by the first save.
        self._group = None if safety.sync_save else mesh.make_host_group("saves")

    def save(self, state: TrainState) -> None:
        """Save the run as it is; raises ConfigError, the same on all ranks, if this or the last one cannot be written."""
        self._lock.hold()
        self._parts.state = {"counters": state.to_dict(), "identity": self._identity}
        if self._parts.scales is not None:
            self._parts.state["fp8"] = gather_scales(self._parts.scales, self._mesh)
        if self._safety.sync_save:
            self._plan = self._plan or make_plan(self._parts, self._mesh)
            save(self._root, state.step, self._parts, self._mesh, self._plan)
            if self._mesh.rank == 0:
                self._remove_replaced(state.step)
            return
        if self._saver is None:
            self._saver = BackgroundSaver(self._root, self._parts, self._mesh, self._remove_replaced, self._group)
            self._say(f"saving         takes up to {self._saver.peak_bytes / 2**20:,.0f} MiB more memory on a rank")
        if self._saver.is_busy:
            self._say(
                "waiting        for the checkpoint before, which is still being written; --save-every is too often"
            )
        self._saver.save(state.step)

    def finish(self) -> None:
        """Return when what was begun is on the disk; raises ConfigError, the same on all ranks, if it cannot be written."""
        if self._saver is not None:
            self._saver.wait()

    def _remove_replaced(self, newest_step: int) -> None:
        """Remove what `newest_step`, which is complete, makes needless; what cannot be removed stays, with a notice."""
        try:
            for path in replaced_checkpoints(self._root, self._safety.keep, self._safety.keep_every, newest_step):
                remove(path)
        except OSError as error:
            _warn(f"an old checkpoint stays, since it cannot be removed: {error}")

    def restore(self) -> tuple[Location, TrainState] | None:
        """Bring back the newest good checkpoint of this run; None if there is none, then nothing is changed.

        Raises ConfigError, the same on all ranks, when what there is turns out to be damaged: some of it may be read by then.
        """
        start, damaged = find_latest(self._root, self._mesh, notice=_warn), None
        while start is not None:
            try:
                return start, _restored(start, self._parts, self._mesh)
            except ConfigError as error:
                damaged = error
                if self._mesh.rank == 0:
                    _warn(f"{error}; it is passed over")
                start = find_latest(self._root, self._mesh, step_of(start), _warn)
        if damaged is not None:
            raise ConfigError(f"{damaged}, and there is no checkpoint before it to go back to")
        return None
