"""What a resumed run was asked to do otherwise than the run that was saved, and whether it would still be the same run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallax.data.checksums import changed_files
from parallax.models.options import OPTION_OF_FIELD, ModelOptions
from parallax.precision.options import Fp8Options
from parallax.storage import is_address, location

# Options that leave the sequence of losses as it is, up to rounding; every other one changes the run. What data and tokenizer
# name is told by their fingerprints, not by their paths.
HARMLESS = frozenset(
    "data tokenizer valid tp pp dp sp schedule schedule_costs chunks pipeline_layout zero zero_group overlap_param_gather "
    "micro_batch recompute loss_chunk steps tokens out resume save_every log_every eval_every eval_steps trace_pipeline profile "
    "timeout config dry_run world_size keep keep_every sync_save exit_after on_bad_step spike_factor max_bad_steps fp8_backend "
    "kernels offload compile".split()
)


@dataclass(frozen=True)
class Difference:
    """An option, or a field of the model, that another run has otherwise. `harmless`: the losses are the same, to rounding."""

    name: str
    before: Any
    now: Any
    harmless: bool

    def __str__(self) -> str:
        if self.name == "fp8_layers":
            return "the same options give another table of FP8 layers in this version of the program"
        if self.name in _FINGERPRINTS:
            return f"the {self.name} is not the same"
        name = OPTION_OF_FIELD.get(self.name, self.name).replace("_", "-")
        return f"{name} was {_shown(self.before)} and is now {_shown(self.now)}"


# What a run's identity holds beside its options, and options whose default depends on another.
_FINGERPRINTS = frozenset({"data", "tokenizer", "fp8_layers"})
_DATA_CHANGED = "the data is not the same"  # said only where no file of it is known to differ
_FOLLOWING_STEPS = frozenset({"warmup_steps", "lr_decay_steps"})
_FP8_DEFAULTS = dataclasses.asdict(Fp8Options())


def _shown(value: Any) -> str:
    return "unset" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """Return in what two runs differ, each a `RunConfig.to_dict()` with fingerprints, under their names, added to it."""
    before, now = (json.loads(json.dumps(saved)) for saved in (before, now))  # tuples become lists, as in a file
    pairs: list[tuple[str, Any, Any, bool]] = []
    for part in ("model", "resolved"):
        old, new = before.get(part, {}), now.get(part, {})
        for name in dict.fromkeys([*old, *new]):
            # The sizes of the model are compared as they came out, whichever option or file gave them.
            if part == "model" or name not in _MODEL_OPTIONS:
                pairs.append((name, old.get(name), new.get(name), part == "resolved" and name in HARMLESS))
    for name in dict.fromkeys([*before, *now]):
        if name not in ("model", "resolved", "options"):
            pairs.append((name, before.get(name), now.get(name), False))
    return [
        Difference(*pair)
        for pair in pairs
        if pair[1] != pair[2] and not (pair[0] == "init" and _same_folder(*pair[1:3]))
    ]


def _same_folder(before: str | None, now: str | None) -> bool:
    """Whether two values of --init name one folder: a path from here and a whole one, or with and without a slash at its end."""
    if before is None or now is None or "none" in (before, now) or is_address(before) or is_address(now):
        return False
    first, second = location(before), location(now)
    return isinstance(first, Path) and isinstance(second, Path) and first.resolve() == second.resolve()


_MODEL_OPTIONS = frozenset(entry.name for entry in dataclasses.fields(ModelOptions))


def changes_that_matter(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return, each as a clause, the differences that would make a resumed run another one."""
    if (odd := _odd_field(before)) is not None:
        return [f"its {odd} is none that a run has"]
    found = [difference for difference in differences(before, now) if not difference.harmless]
    names = {difference.name for difference in found}
    found = [difference for difference in found if not _follows(difference, names)]
    other_program = [str(difference) for difference in found if difference.name == "program"]
    if other_program:
        return other_program  # then everything else differs too
    said_apart = _FOLLOWING_STEPS | {"data_files"}
    clauses = [str(difference) for difference in found if difference.name not in said_apart]
    if following := [difference for difference in found if difference.name in _FOLLOWING_STEPS]:
        flags = [f"--{difference.name.replace('_', '-')}" for difference in following]
        would_be = " and ".join(f"{flag} {_shown(each.now)}" for flag, each in zip(flags, following, strict=True))
        was = " ".join(f"{flag} {_shown(each.before)}" for flag, each in zip(flags, following, strict=True))
        clauses.append(
            f"the learning rate would take another course, with {would_be} (of --steps unless given); add {was}"
        )
    for difference in found:
        if difference.name == "data_files" and (files := changed_files(difference.before or [], difference.now or [])):
            clauses = [*(clause for clause in clauses if clause != _DATA_CHANGED), *files]
    return clauses


def _odd_field(identity: Any) -> str | None:
    """Return which field of a saved identity is not of the kind that a run saves, None if all are."""
    if not isinstance(identity, dict):
        return "identity"
    for part in ("options", "resolved", "model"):
        if not isinstance(identity.get(part, {}), dict):
            return part
    if not isinstance(identity.get("resolved", {}).get("init"), str | None):
        return "init"
    files = identity.get("data_files", [])
    is_record = [
        isinstance(file, list) and [type(value) for value in file] == [str, int, str]
        for file in (files if isinstance(files, list) else [None])
    ]
    return None if all(is_record) else "data_files"


def _follows(difference: Difference, names: set[str]) -> bool:
    """Whether a difference of FP8 only follows from another one among `names`, and cannot be undone by itself."""
    if difference.name == "fp8_layers":
        return not names <= _FINGERPRINTS | {"data_files"}
    return (
        "precision" in names
        and difference.name in _FP8_DEFAULTS
        and difference.before in (None, _FP8_DEFAULTS[difference.name])
    )
