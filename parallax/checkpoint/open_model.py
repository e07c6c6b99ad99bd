"""Open a saved model in one process, to compute with it: for `parallax generate` and for scripts.

from parallax.checkpoint.find import find_model
from parallax.checkpoint.open_model import open_model
model = open_model(find_model("runs/tiny"))
logits = model(ids)[..., : model.config.vocab_size]
"""

from __future__ import annotations

import torch

from parallax.checkpoint.initial_weights import check_weights, load_weights
from parallax.checkpoint.parts import CheckpointParts
from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.models.decoder import DecoderStage
from parallax.models.hugging_face_config import read_hugging_face_config
from parallax.models.stages import build_stages, shape_stages
from parallax.storage import Location, location
from parallax.tensor_parallel.facts import named_parameters_with_facts


def open_model(
    folder: str | Location, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> DecoderStage:
    """Return the whole model of a Hugging Face folder, its weights converted to `dtype`.

    Raises ConfigError: the folder holds no such model, or one that is not supported.
    """
    device, mesh = device or torch.device("cpu"), Mesh(Layout(), 0, torch.device("cpu"))
    config = read_hugging_face_config(folder)
    problems = config.check(mesh.layout, 1, sequence_parallel=False)
    if problems:
        raise ConfigError([f"{folder}: {problem}" for problem in problems])
    layers = [range(config.num_hidden_layers)]
    # Names, then shapes alone: a configuration that lies about sizes is found before memory is asked for.
    check_weights(location(folder), CheckpointParts(config, []))
    (shaped,) = shape_stages(config, layers, [[0]], 0).values()
    check_weights(location(folder), CheckpointParts(config, list(named_parameters_with_facts(shaped))))
    (stage,) = build_stages(config, layers, [[0]], 0, seed=None, device=device, dtype=dtype).values()
    load_weights(folder, CheckpointParts(config, list(named_parameters_with_facts(stage)), dtype=dtype), mesh)
    return stage.eval()
