"""Compare what a run needs with the tensors of a checkpoint, and copy what this rank holds of them into place.

Only the blocks that a rank needs are read, except for GPT-2's model tensors, which are stored transposed and are read
whole, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from parallax.checkpoint.geometry import Holding, holding_of
from parallax.checkpoint.manifest import TensorRecord
from parallax.checkpoint.parts import DTYPE_NAMES, DTYPES, CheckpointParts, OptimizerPiece, weights_of
from parallax.checkpoint.reader import READ_BYTES, TensorReader
from parallax.checkpoint.safetensors_file import ITEM_BYTES
from parallax.models.hugging_face import HuggingFaceTensor, hugging_face_tensors
from parallax.tensor_parallel.facts import ParameterFacts

MAIN_PARAM = "main_param"

Place = tuple[Holding, torch.Tensor, int, int]  # a tensor that is the flat range [start, stop) of what is held


def model_problem(
    where: str, records: Mapping[str, TensorRecord], parts: CheckpointParts, any_type: bool
) -> str | None:
    """Return, as a sentence, how the first model tensor that this rank reads differs from what is stored.

    any_type: whether the types of stored floating-point tensors may differ from the parameters'.
    """
    held = {name: (facts.full_shape, DTYPE_NAMES[parameter.dtype]) for name, parameter, facts in parts.parameters}
    for tensor, names in _held_tensors(parts):
        shape = tensor.shape([held[name][0] for name in tensor.sources])
        dtype = None if any_type else held[names[0]][1]
        problem = _difference(where, tensor.name, records, shape, dtype)
        if problem is not None:
            return problem
    return None


def optimizer_problem(where: str, records: Mapping[str, TensorRecord], parts: CheckpointParts) -> str | None:
    """Return, as a sentence, how the first optimizer state that this rank reads differs from what is stored."""
    for name, kind, state, facts, _, _ in _stored_states(parts):
        problem = _difference(where, f"{name}.{kind}", records, facts.full_shape, DTYPE_NAMES[state.dtype])
        if problem is not None:
            return problem
    return None


def _difference(
    where: str, name: str, records: Mapping[str, TensorRecord], shape: tuple[int, ...], dtype: str | None
) -> str | None:
    record = records.get(name)
    if record is None:
        return f"{where} has no tensor {name}, which this run needs"
    if record.shape != shape:
        return f"{where}: {name} has shape {list(record.shape)}, this run needs {list(shape)}"
    if record.dtype != dtype and not (dtype is None and record.dtype in DTYPES):
        return f"{where}: {name} is of type {record.dtype}, this run needs {dtype or 'floating point'}; see --precision"
    return None


def fill_model(reader: TensorReader, parts: CheckpointParts, main_params: bool) -> None:
    """Copy the model's tensors into the parameters, and into the optimizer's main parameters.

    main_params: into all of them; otherwise only those that have their parameter's type and so are not stored.
    """
    places: dict[str, list[Place]] = {}
    for name, parameter, facts in parts.parameters:
        holding = holding_of(facts, tuple(parameter.shape))
        here = places.setdefault(name, [])
        here += [(holding, values, start, stop) for start, stop, values in weights_of(parts.optimizer, name, parameter)]
        for piece in _pieces(parts, name):
            main = piece.tensors.get(MAIN_PARAM)
            if main is not None and (main_params or main.dtype == parameter.dtype):
                here.append((holding, main, piece.start, piece.stop))
    for tensor, names in _held_tensors(parts):
        if tensor.is_stored_as_is:
            for place in places[names[0]]:
                _copy_stored(reader, tensor.name, place)
            continue
        whole = dict(zip(tensor.sources, tensor.take(reader.read_whole(tensor.name)), strict=True))
        for name in names:
            for place in places[name]:
                _copy_whole(whole[name], place)


def fill_optimizer(reader: TensorReader, parts: CheckpointParts) -> None:
    """Copy the optimizer's stored states into this rank's pieces of them."""
    for name, kind, state, facts, local_shape, piece in _stored_states(parts):
        _copy_stored(reader, f"{name}.{kind}", (holding_of(facts, local_shape), state, piece.start, piece.stop))


def _held_tensors(parts: CheckpointParts) -> Iterator[tuple[HuggingFaceTensor, list[str]]]:
    """Yield the model tensors that this rank holds a part of, with the parameters that it holds of them."""
    held = {name for name, _, _ in parts.parameters}
    for tensor in hugging_face_tensors(parts.config):
        names = [name for name in tensor.sources if name in held]
        if names:
            yield tensor, names


def _pieces(parts: CheckpointParts, name: str) -> Iterator[OptimizerPiece]:
    yield from parts.optimizer.pieces(name) if parts.optimizer is not None else ()


def _stored_states(
    parts: CheckpointParts,
) -> Iterator[tuple[str, str, torch.Tensor, ParameterFacts, tuple[int, ...], OptimizerPiece]]:
    """Yield parameter, kind, state, facts, local shape and piece of each state that is stored for itself."""
    for name, parameter, facts in parts.parameters:
        for piece in _pieces(parts, name):
            for kind, state in piece.tensors.items():
                if kind != MAIN_PARAM or state.dtype != parameter.dtype:
                    yield name, kind, state, facts, tuple(parameter.shape), piece


def _copy_stored(reader: TensorReader, name: str, place: Place) -> None:
    holding, local, start, stop = place
    flat = local.detach().view(-1)
    limit = READ_BYTES // ITEM_BYTES[reader.records[name].dtype]
    for block in holding.blocks(start, stop):
        for box in block.box.chunks(limit):
            part = block.within(box)
            assert part is not None, (block, box)
            reader.read_into(part.view(flat, start), name, box, holding.full_columns)


def _copy_whole(whole: torch.Tensor, place: Place) -> None:
    holding, local, start, stop = place
    flat = local.detach().view(-1)
    matrix = whole.reshape(holding.rows, holding.full_columns)
    for block in holding.blocks(start, stop):
        box = block.box
        block.view(flat, start).copy_(matrix[box.row : box.stop_row, box.column : box.stop_column])
