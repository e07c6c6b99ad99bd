"""Initial weights are a function of (seed, name, index in the full tensor)."""

import numpy as np
import torch

from parallax.mesh import Layout, plan_mesh
from parallax.models.decoder import DecoderStage, StageSpec
from parallax.models.presets import PRESETS
from parallax.tensor_parallel.facts import initial_values, named_parameters_with_facts


def _full(layout: Layout, pp_stages: int) -> dict[str, np.ndarray]:
    config = PRESETS["tiny"].resolved()
    result: dict[str, np.ndarray] = {}
    for rank in range(layout.world_size):
        mesh = plan_mesh(layout, rank)
        count = config.num_hidden_layers // pp_stages
        spec = StageSpec(range(mesh.pp_rank * count, (mesh.pp_rank + 1) * count), mesh.pp_rank, pp_stages)
        with torch.device("meta"):
            stage = DecoderStage(config, spec, tp=mesh.tp)
        for name, _, facts in named_parameters_with_facts(stage):
            whole = result.setdefault(name, np.full(facts.full_shape, np.nan, np.float32))
            place = tuple(slice(start, start + size) for start, size in zip(facts.start, facts.held_shape, strict=True))
            whole[place] = initial_values(name, facts, seed=7)
    return result


def test_every_layout_starts_from_the_same_weights_bit_for_bit() -> None:
    single = _full(Layout(), 1)
    for layout in (Layout(tp=2, pp=2), Layout(tp=8), Layout(pp=8), Layout(tp=4, dp=2)):
        other = _full(layout, layout.pp)
        assert other.keys() == single.keys()
        for name in single:
            assert np.array_equal(single[name], other[name]), (layout, name)


def test_values_look_normal_and_depend_on_seed_and_name() -> None:
    config = PRESETS["tiny"].resolved()
    with torch.device("meta"):
        stage = DecoderStage(config)
    facts = {name: facts for name, _, facts in named_parameters_with_facts(stage)}
    name = "model.layers.0.mlp.up_proj.weight"
    values = initial_values(name, facts[name], seed=1)
    assert abs(values.std() / 0.02 - 1) < 0.01 and abs(values.mean()) < 1e-3
    assert not np.array_equal(values, initial_values(name, facts[name], seed=2))
    assert not np.array_equal(values, initial_values("model.layers.1.mlp.up_proj.weight", facts[name], seed=1))


def test_a_plain_module_is_taken_as_held_whole_by_every_tp_rank() -> None:
    tp = plan_mesh(Layout(tp=4), 1).tp
    facts = {name: facts for name, _, facts in named_parameters_with_facts(torch.nn.Linear(3, 5), tp)}
    assert {name: (fact.replicas.tp, fact.partial, fact.decays) for name, fact in facts.items()} == {
        "weight": (4, False, True),
        "bias": (4, False, False),
    }
