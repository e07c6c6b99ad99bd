"""The split of layers over stages that plan and run share."""

from __future__ import annotations

import pytest

from parallax.errors import ConfigError
from parallax.models.config import flops_per_token
from parallax.models.presets import PRESETS
from parallax.training.stages import stage_flops, stage_ranges


@pytest.mark.parametrize(("preset", "pp"), [("tiny", 4), ("llama3-405b", 16), ("gpt3-175b", 7), ("qwen3-0.6b", 3)])
def test_every_layer_is_in_one_stage_and_the_costs_add_up(preset: str, pp: int) -> None:
    config = PRESETS[preset].resolved()
    ranges = stage_ranges(config, pp, None, 1024)
    assert [index for layers in ranges for index in layers] == list(range(config.num_hidden_layers))
    assert sum(stage_flops(config, ranges, 1024)) == pytest.approx(flops_per_token(config, 1024), rel=1e-12)


def test_the_head_counts_so_that_the_last_stage_of_llama3_405b_has_fewer_layers() -> None:
    ranges = stage_ranges(PRESETS["llama3-405b"].resolved(), 16, None, 8192)
    assert [len(layers) for layers in ranges] == [
        7,
        *[8] * 14,
        7,
    ]  # as published: a layer less in the first and the last


def test_a_layout_of_the_user_is_taken_as_it_is() -> None:
    config = PRESETS["tiny"].resolved()
    assert stage_ranges(config, 2, "Et*6|t*2L", 128) == [range(6), range(6, 8)]
    with pytest.raises(ConfigError):
        stage_ranges(config, 2, "Et*6|t*3L", 128)
