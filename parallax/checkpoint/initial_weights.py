"""Start from the weights of a Hugging Face model folder, which need not be of our making.

What is read is what safetensors files say of themselves: there is no manifest, so no checksum. Folders with pickles only
are refused. Types are converted to the run's.
"""

from __future__ import annotations

from pathlib import Path

from parallax.checkpoint.agreement import together
from parallax.checkpoint.files import file_inside
from parallax.checkpoint.fill import fill_model, model_problem
from parallax.checkpoint.manifest import Slice, TensorRecord, check_path
from parallax.checkpoint.names import INDEX
from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.reader import TensorReader
from parallax.checkpoint.safetensors_file import parse_json, read_header
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.models.hugging_face import hugging_face_tensors

ONE_FILE = "model.safetensors"


def load_weights(path: str | Path, parts: CheckpointParts, mesh: Mesh) -> None:
    """Fill the parameters, and the optimizer's main parameters if it has some, from a model folder; called by all ranks.

    Raises ConfigError, the same on all ranks: no such folder, no safetensors files in it, or another model.
    """
    folder = Path(path)

    def checked() -> dict[str, TensorRecord]:
        records = _under_our_names(_read_records(folder), parts)
        problem = model_problem(str(folder), records, parts, any_type=True)
        if problem is not None:
            raise ConfigError(problem)
        return records

    records = together(checked, mesh, "checking the model")

    def fill() -> None:
        with TensorReader(folder, records) as reader:
            fill_model(reader, parts, main_params=True)

    together(fill, mesh, "reading the model")


def _read_records(folder: Path) -> dict[str, TensorRecord]:
    """Return every tensor of a model folder, from the headers of its files."""
    records: dict[str, TensorRecord] = {}
    for name in _weight_files(folder):
        for tensor, entry in read_header(file_inside(folder, name)).items():
            start = (0,) * len(entry.shape)
            records[tensor] = TensorRecord(entry.dtype, entry.shape, (Slice(name, entry.offset, start, entry.shape),))
    return records


def _weight_files(folder: Path) -> list[str]:
    index = folder / Path(INDEX).name
    if (folder / ONE_FILE).is_file():
        return [ONE_FILE]
    if not index.is_file():
        raise ConfigError(
            f"{folder} has no safetensors files of a model ({ONE_FILE} or {index.name}); pickles are not read"
        )
    try:
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
        for name in names:
            check_path(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is no valid index of a model: {error}") from None
    return names


def _under_our_names(records: dict[str, TensorRecord], parts: CheckpointParts) -> dict[str, TensorRecord]:
    """Return the tensors with the prefix that some published models lack, GPT-2's among them."""
    for tensor in hugging_face_tensors(parts.config):
        bare = tensor.name.partition(".")[2]
        if tensor.name not in records and bare in records:
            records[tensor.name] = records[bare]
    return records
