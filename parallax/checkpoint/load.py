"""Read a checkpoint into the run, whatever layout wrote it and whatever layout reads it.

all    check the manifest, the files' sizes, the configuration, and every tensor that this rank needs
each   verify its share of the small files and of the tensor files' headers; all agree before a tensor is touched
each   read the boxes of the full tensors that it holds into place, each block proved as it is read; padding stays as it is
"""

from __future__ import annotations

from typing import Any

from parallax.checkpoint.agreement import together
from parallax.checkpoint.fill import fill_model, fill_optimizer, model_problem, optimizer_problem
from parallax.checkpoint.manifest import Manifest, read_manifest
from parallax.checkpoint.names import CONFIG, MODEL, OPTIMIZER, STATE
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.reader import TensorReader
from parallax.checkpoint.state_file import read_json, read_state_file
from parallax.checkpoint.verify import check_contents, check_files, files_to_verify
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.models.hugging_face_config import to_hugging_face
from parallax.storage import Location, location

# Fields of config.json that say nothing of what the trained model computes, or that the shapes of its tensors say.
_FREE_FIELDS = {"architectures", "initializer_range", "torch_dtype", "max_position_embeddings", "n_positions"}


def load(path: str | Location, parts: CheckpointParts, mesh: Mesh) -> dict[str, Any]:
    """Fill the parameters and the optimizer from the checkpoint at `path`; return state.json, `parts.state` in "training".

    Called by all ranks. Nothing is changed unless everything holds that can be checked without reading the tensors. Damage inside
    of a tensor is found when it is read: then what was there before is lost, and another checkpoint has to be loaded.

    Raises ConfigError, the same on all ranks: the checkpoint is damaged, incomplete, or of another model.
    """
    folder = location(path)
    manifest = together(lambda: _manifest(folder, check=mesh.rank == 0), mesh, "reading the manifest")
    state = together(lambda: _check(folder, manifest, parts, mesh), mesh, "checking the checkpoint")
    together(lambda: _fill(folder, manifest, parts), mesh, "reading the checkpoint")
    if parts.optimizer is not None:
        parts.optimizer.step_count = state["optimizer"]["step_count"]
    return state


def read_state(path: str | Location) -> dict[str, Any]:
    """Return state.json of the checkpoint at `path`: "step", "optimizer", and what the trainer gave as "training".

    Raises ConfigError when the checkpoint is incomplete or the file damaged; tensors are not looked at.
    """
    folder = location(path)
    manifest = _manifest(folder, check=True)
    problems = check_contents(folder, manifest, [STATE]) if STATE in manifest.files else []
    if problems:
        raise ConfigError(problems[0])
    return read_state_file(folder, manifest)


def _manifest(folder: Location, check: bool) -> Manifest:
    """Return the manifest; check: after a look at every file that it names, which one rank does for all."""
    manifest = read_manifest(folder)
    problems = check_files(folder, manifest) if check else []
    if problems:
        raise ConfigError(problems[0])
    return manifest


def _check(folder: Location, manifest: Manifest, parts: CheckpointParts, mesh: Mesh) -> dict[str, Any]:
    """Return state.json after every check that needs the content of files; reading them is shared among the ranks."""
    share = files_to_verify(manifest, mesh.rank, mesh.layout.world_size)
    problems = check_contents(folder, manifest, share, tensors_too=False) or _check_config(folder, manifest, parts)
    problem = problems[0] if problems else model_problem(f"{folder / MODEL}", manifest.model, parts, any_type=False)
    problem = problem or optimizer_problem(f"{folder / OPTIMIZER}", manifest.optimizer, parts)
    if problem is not None:
        raise ConfigError(problem)
    state = read_state_file(folder, manifest)
    count = state["optimizer"].get("step_count")
    if parts.optimizer is not None and not (type(count) is int and 0 <= count < 2**53):
        raise ConfigError(f"{folder / STATE} has no step count of an optimizer, which this run needs")
    return state


def _check_config(folder: Location, manifest: Manifest, parts: CheckpointParts) -> list[str]:
    saved = read_json(folder, CONFIG, manifest)
    for key, asked in to_hugging_face(parts.config.resolved(), "").items():
        if key not in _FREE_FIELDS and saved.get(key) != asked:
            return [f"{folder} is of another model: its {key} is {saved.get(key)}, this run's is {asked}"]
    return []


def _fill(folder: Location, manifest: Manifest, parts: CheckpointParts) -> None:
    with TensorReader(folder, manifest.model, manifest.files) as reader:
        fill_model(reader, parts, main_params=False)
    with TensorReader(folder, manifest.optimizer, manifest.files) as reader:
        fill_optimizer(reader, parts)
