"""The names of a checkpoint's files and folders."""

from __future__ import annotations

from parallax.storage import Location

MODEL, OPTIMIZER = "model", "optimizer"  # folders; in them, the tensor files begin with the same word
INDEX = "model/model.safetensors.index.json"
CONFIG = "model/config.json"
STATE = "state.json"
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # ends the name of a folder whose save is under way or was cut
MARK = "partial"  # behind an address: a file in such a folder


def step_name(step: int) -> str:
    """Return the name of the checkpoint folder of a step."""
    return f"step-{step:08d}"


def is_step(name: str) -> bool:
    """Whether this is the name of a checkpoint's folder."""
    digits = name.removeprefix("step-")
    return digits.isascii() and digits.isdecimal() and name == step_name(int(digits))


def step_of(folder: Location) -> int:
    """Return the step of a checkpoint folder, from its name."""
    return int(folder.name.removeprefix("step-"))
