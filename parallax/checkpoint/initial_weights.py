"""Start from the weights of a Hugging Face model folder, which need not be of our making.

What is read is what safetensors files say of themselves: there is no manifest, so no checksum. Folders with pickles only
are refused. So is a folder whose tensors are not exactly the model's: one that is missing would stay at its initial value,
one left over would have computed something. Types are converted to the run's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, TypedDict

import torch

from parallax.checkpoint.agreement import together
from parallax.checkpoint.files import FileReader
from parallax.checkpoint.fill import fill_model, model_problem
from parallax.checkpoint.geometry import Box
from parallax.checkpoint.manifest import Slice, TensorRecord, check_path
from parallax.checkpoint.names import INDEX
from parallax.checkpoint.parts import DTYPES, CheckpointParts
from parallax.checkpoint.reader import TensorReader
from parallax.checkpoint.safetensors_file import parse_json, read_header
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.models.config import DecoderConfig
from parallax.models.hugging_face import hugging_face_tensors
from parallax.models.hugging_face_config import from_hugging_face, read_fields
from parallax.storage import Location, location, num_bytes

ONE_FILE = "model.safetensors"
CARRIED_FILES = ("generation_config.json",)
CARRIED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Buffers that older versions of transformers stored: GPT-2's causal mask, the rotary frequencies. All follow from config.json.
_BUFFERS = re.compile(r"(^|\.)h\.\d+\.attn\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")
_HEAD = "lm_head.weight"
# What a stored model may say otherwise than the run: it decides neither logits nor, with rotary positions, any shape.
_FREE = ("initializer_range", "max_position_embeddings")
_COMPARED_ROWS = 4096


def load_weights(path: str | Location, parts: CheckpointParts, mesh: Mesh) -> None:
    """Fill the parameters, and the optimizer's main parameters if it has some, from a model folder; called by all ranks.

    Each rank reads its slices, but GPT-2's transposed tensors whole, one at a time.

    Raises ConfigError, the same on all ranks: no such folder, no safetensors files in it, another model, or tensors that are
    not exactly the model's.
    """
    folder = location(path)
    records = together(lambda: check_weights(folder, parts), mesh, "checking the model")

    def fill() -> None:
        if _HEAD in records and parts.config.tie_word_embeddings and mesh.rank == 0:
            _check_head(folder, records, parts.config)
        with TensorReader(folder, records, find=_file) as reader:
            fill_model(reader, parts, main_params=True)

    together(fill, mesh, "reading the model")


def check_weights(folder: Location, parts: CheckpointParts) -> dict[str, TensorRecord]:
    """Return where the tensors of this rank's parameters are, which may be on the meta device: no tensor is read.

    Raises ConfigError as `load_weights` does.
    """
    _check_config(folder, parts.config)
    records = _of_this_model(folder, _read_records(folder), parts.config)
    problem = model_problem(str(folder), records, parts, any_type=True)
    if problem is not None:
        raise ConfigError(problem)
    return records


class Carried(TypedDict, total=False):
    """What a run takes over from a model folder, as `CheckpointParts` has it."""

    model_files: Mapping[str, bytes]
    config_fields: Mapping[str, Any]


def look_into(init: Location | None, carried_from: Location | None, config: DecoderConfig, mesh: Mesh) -> Carried:
    """Check, before anything is built, that the folder `init` holds the tensors of the model; return what is carried over.

    Called by all ranks. Raises ConfigError, the same on all of them, as `load_weights` does.
    """

    def look() -> Carried:
        if init is not None:
            try:
                check_weights(init, CheckpointParts(config, []))
            except ConfigError as error:
                raise ConfigError([f"--init {problem}" for problem in error.problems]) from error
        if carried_from is None:
            return {}
        files, fields = carried_over(carried_from)
        return {"model_files": files, "config_fields": fields}

    return together(look, mesh, "reading the model")


def carried_over(path: str | Location) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return what a model trained from a folder keeps of it: `model_files` and `config_fields` of `CheckpointParts`.

    These are how to generate, and the ids of special tokens, of which there may be several where a tokenizer names one.
    Raises ConfigError when config.json cannot be read; OSError when a file cannot.
    """
    folder = location(path)
    files = {name: (folder / name).read_bytes() for name in CARRIED_FILES if (folder / name).is_file()}
    fields = read_fields(folder)
    return files, {name: fields[name] for name in CARRIED_FIELDS if fields.get(name) is not None}


def _check_config(folder: Location, config: DecoderConfig) -> None:
    """Refuse a folder that describes another model than the run's; one without config.json is told by its tensors alone."""
    if not (folder / "config.json").is_file():
        return
    stored = from_hugging_face(read_fields(folder), str(folder / "config.json"))
    for entry in dataclasses.fields(config):
        here, there = getattr(config.resolved(), entry.name), getattr(stored, entry.name)
        if here != there and entry.name not in _FREE:
            raise ConfigError(f"{folder} holds another model: its {entry.name} is {there}, this run's is {here}")


def _read_records(folder: Location) -> dict[str, TensorRecord]:
    """Return every tensor of a model folder, from the headers of its files."""
    records: dict[str, TensorRecord] = {}
    for name in _weight_files(folder):
        path = _file(folder, name)
        with FileReader(path) as file:
            header = read_header(path, num_bytes(path), file.read)
        for tensor, entry in header.items():
            if tensor in records:
                raise ConfigError(f"{folder} holds {tensor} twice, in {records[tensor].slices[0].file} and in {name}")
            start = (0,) * len(entry.shape)
            records[tensor] = TensorRecord(entry.dtype, entry.shape, (Slice(name, entry.offset, start, entry.shape),))
    return records


def _weight_files(folder: Location) -> list[str]:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give that of a Hugging Face model")
    index = folder / PurePosixPath(INDEX).name
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


def _of_this_model(folder: Location, stored: dict[str, TensorRecord], config: DecoderConfig) -> dict[str, TensorRecord]:
    """Return the tensors by the names that they have today.

    Some folders lack the prefix (`transformer.`, `model.`), as models saved without a head do. A tied head may be stored too.
    """
    rest, records, missing = dict(stored), {}, []
    for tensor in hugging_face_tensors(config):
        name = next((name for name in (tensor.name, tensor.name.partition(".")[2]) if name in rest), None)
        if name is None:
            missing.append(tensor.name)
        else:
            records[tensor.name] = rest.pop(name)
    if config.tie_word_embeddings and _HEAD in rest:
        records[_HEAD] = rest.pop(_HEAD)
    unexpected = [name for name in rest if not _BUFFERS.search(name)]
    problems = [f"lacks {_listed(missing)}"] if missing else []
    problems += [f"holds what this model has no place for, {_listed(unexpected)}"] if unexpected else []
    if problems:
        raise ConfigError(f"{folder} does not hold this run's model: it {' and '.join(problems)}")
    return records


def _listed(names: Iterable[str]) -> str:
    first, count = sorted(names)[:3], len(list(names))
    return ", ".join(first) + (f" and {count - 3} more" if count > 3 else "")


def _check_head(folder: Location, records: Mapping[str, TensorRecord], config: DecoderConfig) -> None:
    """Refuse a head that is stored though it is tied, unless it is the embedding."""
    embedding = hugging_face_tensors(config)[0].name
    rows, columns = records[embedding].shape
    same = records[_HEAD].shape == (rows, columns) and records[_HEAD].dtype in DTYPES
    with TensorReader(folder, records, find=_file) as reader:
        for row in range(0, rows if same else 0, _COMPARED_ROWS):
            box = Box(row, min(row + _COMPARED_ROWS, rows), 0, columns)
            embedded, head = (reader.read(name, box, columns).float() for name in (embedding, _HEAD))
            same = same and torch.equal(embedded, head)
    if not same:
        raise ConfigError(
            f"{folder}: config.json ties the head to {embedding}, but {_HEAD} is stored with other values"
        )


def _file(folder: Location, name: str) -> Location:
    """Return a file of a model folder, which may be a link: the cache of Hugging Face's hub is made of them."""
    if not (folder / name).is_file():
        raise ConfigError(f"{folder / name} is missing, or no file")
    return folder / name
