"""state.json, and the other JSON files of a checkpoint."""

from __future__ import annotations

from typing import Any

from parallax.checkpoint.files import file_inside
from parallax.checkpoint.manifest import Manifest
from parallax.checkpoint.names import STATE
from parallax.checkpoint.safetensors_file import parse_json
from parallax.errors import ConfigError
from parallax.storage import Location


def read_state_file(folder: Location, manifest: Manifest) -> dict[str, Any]:
    """Return state.json; raises ConfigError unless it is there and of the manifest's step."""
    state = read_json(folder, STATE, manifest)
    is_state = all(isinstance(state.get(key), dict) for key in ("optimizer", "training"))
    if not is_state or type(state.get("step")) is not int or state["step"] != manifest.step:
        raise ConfigError(f"{folder / STATE} is not the state of a run at step {manifest.step}")
    return state


def read_json(folder: Location, name: str, manifest: Manifest) -> dict[str, Any]:
    """Return the object in a file that the manifest names; raises ConfigError, OSError."""
    if name not in manifest.files:
        raise ConfigError(f"{folder} is no checkpoint of a run: it has no {name}")
    try:
        fields = parse_json(file_inside(folder, name).read_bytes())
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder / name} is no valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{folder / name} holds no JSON object")
    return fields
