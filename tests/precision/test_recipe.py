"""The recipe as a value: what it refuses, and which layers its patterns name."""

from __future__ import annotations

from typing import Any

import pytest

from parallax.models.config import DecoderConfig, linear_layers
from parallax.precision import Recipe
from parallax.precision.options import Fp8Options
from parallax.precision.recipe import in_words, matches

LAYERS = list(linear_layers(DecoderConfig(num_hidden_layers=12).resolved()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scaling": "Tile"}, "scaling='Tile' is unknown; use 'tile' or 'delayed'"),
        ({"fp8_format": "e5m2"}, "fp8_format='e5m2' is unknown; use 'e4m3' or 'hybrid'"),
        ({"power_of_two_scales": "pow2"}, "power_of_two_scales='pow2' must be True or False"),
        ({"amax_history_len": 0}, "amax_history_len=0 must be at least 1, and a whole number"),
        ({"amax_history_len": 2.0}, "amax_history_len=2.0 must be at least 1, and a whole number"),
        ({"margin": 99}, "margin=99 must be between 0 and 8, and a whole number"),
        ({"margin": True}, "margin=True must be between 0 and 8, and a whole number"),
        ({"keep": "layers.12"}, "keep='layers.12' must be a tuple of patterns"),
        ({"keep": ("",)}, "must be a tuple of patterns that are not empty"),
        ({"keep": (12,)}, "must be a tuple of patterns"),
        ({"keep": None}, "keep=None must be a tuple of patterns"),
        ({"keep": 3}, "keep=3 must be a tuple of patterns"),
        ({"keep": (name for name in ("layers.0", ""))}, "keep=('layers.0', '') must be a tuple of patterns"),
        ({"margin": 5}, "margin=5 goes with scaling='delayed'"),
        ({"amax_history_len": 3}, "amax_history_len=3 goes with scaling='delayed'"),
        ({"scaling": ["tile"]}, "scaling=['tile'] is unknown"),
        ({"scaling": "delayed", "power_of_two_scales": True}, "power_of_two_scales=True goes with scaling='tile'"),
    ],
    ids=lambda value: value.partition(" ")[0] if isinstance(value, str) else None,  # a generator shows its address
)
def test_what_would_silently_be_another_recipe_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        Recipe(**wrong)
    assert said in str(error.value)


def test_patterns_may_be_a_list_and_a_recipe_is_a_value_all_the_same() -> None:
    assert Recipe(keep=["layers.0"]) == Recipe(keep=("layers.0",))  # type: ignore[arg-type]
    assert Recipe(keep=(name for name in ["layers.0"])) == Recipe(keep=("layers.0",))  # type: ignore[arg-type]
    assert hash(Recipe(keep=["layers.0"])) == hash(Recipe(keep=("layers.0",)))  # type: ignore[arg-type]


def test_every_name_that_the_table_prints_names_just_its_layers() -> None:
    recipe = Recipe(keep=("layers.0", "layers.3", "layers.11.mlp", "layers.7.self_attn.q_proj"))
    table = recipe.table(LAYERS)
    covered: list[str] = []
    for line in in_words(table):
        name, how = line.split(maxsplit=1)
        named = [layer for layer in LAYERS if matches(name, layer)]
        assert named and {in_words({layer: table[layer]})[0].split(maxsplit=1)[1] for layer in named} == {how}
        covered += named
    assert sorted(covered) == sorted(LAYERS)


def test_ranges_of_layers_are_numbers_and_not_letters() -> None:
    def named(pattern: str) -> list[int]:
        return [i for i in range(12) if matches(pattern, f"model.layers.{i}.mlp.up_proj")]

    assert named("layers.1-10") == list(range(1, 11))
    assert named("model.layers.0,2-4,11.mlp") == [0, 2, 3, 4, 11]
    assert named("layers.1") == [1] and named("layers.[1-3]") == [1, 2, 3] and named("layers.1?") == [10, 11]
    assert named("layers.4-2") == named("layers.12-20") == named("layers.1-") == named("1-2_proj") == []


def test_an_empty_pattern_is_shown() -> None:
    layers = {"model.layers.0.mlp.up_proj": (32, 32), "lm_head": (32, 32)}
    for pattern in ("", " "):
        (problem,) = Fp8Options(fp8_keep=(pattern,)).check_model(layers, 16)
        assert problem.startswith(
            f"--fp8-keep {pattern!r} names no layer; layers are called model.layers.0.mlp.up_proj"
        )


def test_options_that_are_wrong_are_told_and_make_no_recipe() -> None:
    layers = {"model.layers.0.mlp.up_proj": (32, 32), "lm_head": (32, 32)}
    for options in (Fp8Options(fp8_recipe="delayed", fp8_margin=99), Fp8Options("delayed", fp8_amax_history=0)):
        assert options.check("fp8") and options.check_model(layers, 16) == []
