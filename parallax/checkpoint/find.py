"""Find checkpoints by looking at them: no file says which one is the latest, so none can say it wrongly."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from parallax.checkpoint.manifest import read_manifest
from parallax.checkpoint.names import MANIFEST, MODEL, step_name
from parallax.checkpoint.place import is_cut
from parallax.checkpoint.verify import check_files
from parallax.errors import ConfigError
from parallax.models.hugging_face_config import read_fields
from parallax.storage import Location, RemotePath, location

if TYPE_CHECKING:
    from parallax.mesh import Mesh


def list_checkpoints(root: str | Location) -> list[tuple[int, Location]]:
    """Return (step, folder) of all finished saves under `root`, newest first, good or not."""
    root = location(root)
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := re.fullmatch(r"step-(\d{8,})", path.name))]
    return sorted(
        ((step, path) for step, path in found if path.is_dir() and path.name == step_name(step)), reverse=True
    )


def finished(root: str | Location) -> list[str]:
    """Return the names of the checkpoints under `root`, newest first, good or damaged, but of no save that was cut."""
    return [path.name for _, path in list_checkpoints(root) if not (isinstance(path, RemotePath) and is_cut(path))]


def find_latest(
    root: str | Location,
    mesh: Mesh | None = None,
    older_than: int | None = None,
    notice: Callable[[str], None] = lambda text: None,
) -> Location | None:
    """Return the newest checkpoint under `root` whose manifest holds and whose files are there in their sizes, or None.

    Contents are verified by `load`; when it refuses one, `older_than` its step finds the one before. Given a mesh, called
    by all ranks: rank 0 looks and all return the same. notice: is told, on the rank that looks, why a newer one is passed over.
    """
    found, problems = None, []
    if mesh is None or mesh.rank == 0:
        try:
            found = _find(location(root), older_than, notice)
        except OSError as error:
            problems = [f"{root} cannot be searched for checkpoints: {error.strerror}"]
    if mesh is not None:
        from parallax.collectives import gather_json

        answer = [None if found is None else str(found), problems]
        found, problems = gather_json(answer, mesh.world, mesh.device)[0]
    if problems:
        raise ConfigError(problems)
    return None if found is None else location(found)


def _find(root: Location, older_than: int | None, notice: Callable[[str], None]) -> Location | None:
    for step, path in list_checkpoints(root):
        if older_than is not None and step >= older_than:
            continue
        try:
            problems = check_files(path, read_manifest(path))
        except ConfigError as error:
            problems = error.problems
        if not problems:
            return path
        notice(f"{problems[0]}; {path.name} is passed over")
    return None


def find_model(path: str | Location) -> Location:
    """Return the Hugging Face folder that `path` names: itself, or in a checkpoint, or in the newest one of a run.

    Raises ConfigError when there is none, or when the checkpoint is not complete.
    """
    path = location(path)
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; give a run, a checkpoint or a Hugging Face model's folder")
    for root in (path / "checkpoints", path):
        if list_checkpoints(root):
            newest = find_latest(root)
            if newest is None:
                raise ConfigError(f"{root} holds no complete checkpoint; see parallax checkpoint list {path}")
            return newest / MODEL
    if (path / MANIFEST).is_file():
        problems = check_files(path, read_manifest(path))
        if problems:
            raise ConfigError(problems[0])
        return path / MODEL
    kinds = "give a run, a checkpoint or a Hugging Face model's folder"
    if (path / "checkpoints").is_dir() or not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds neither a checkpoint nor config.json; {kinds}")
    if "model_type" not in read_fields(path):
        raise ConfigError(f"{path} holds no checkpoint yet, and its config.json is that of a run; {kinds}")
    return path


def tokenizer_of(given: str | None) -> str | None:
    """Return what of --tokenizer a tokenizer is loaded from: of a run or a checkpoint the model's folder, else `given` itself.

    Raises ConfigError when it is a run or a checkpoint, but not complete.
    """
    if given in (None, "bytes"):
        return given
    path = location(given)
    if not any((path / name).exists() for name in ("checkpoints", MANIFEST)) and not list_checkpoints(path):
        return given
    try:
        return str(find_model(path))
    except ConfigError as error:
        raise ConfigError([f"--tokenizer {given}: {problem}" for problem in error.problems]) from None
