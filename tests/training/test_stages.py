"""The split of layers over stages that plan and run share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.errors import ConfigError
from parallax.models.config import flops_per_token
from parallax.models.presets import PRESETS
from parallax.pipeline.schedules import make_schedule
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


@pytest.mark.parametrize(("layers", "pp", "chunks"), [(30, 4, 1), (80, 16, 2), (10, 2, 2), (7, 3, 2), (12, 4, 3)])
def test_no_layer_is_lost_by_division_whatever_the_schedule(layers: int, pp: int, chunks: int) -> None:
    config = replace(PRESETS["tiny"], num_hidden_layers=layers).resolved()
    schedule = make_schedule("interleaved" if chunks > 1 else "1f1b", pp, 4 * pp, chunks if chunks > 1 else None)
    ranges = stage_ranges(config, schedule.num_stages, None, 128, pp)
    assert [index for stage in ranges for index in stage] == list(range(layers))
    held = [index for rank in range(pp) for stage in schedule.stages_of(rank) for index in ranges[stage]]
    assert sorted(held) == list(range(layers))


def test_a_layout_of_parts_is_cut_into_the_stages_of_the_schedule() -> None:
    config = replace(PRESETS["tiny"], num_hidden_layers=12).resolved()
    ranges = stage_ranges(config, 8, "Et*3|t*3|t*3|t*3L", 128, 4)
    assert [len(stage) for stage in ranges] == [2, 1] * 4
    assert [index for stage in ranges for index in stage] == list(range(12))
    with pytest.raises(ConfigError, match="each of its 4 parts is cut into 2 stages, so it needs 2 layers"):
        stage_ranges(config, 8, "Et*5|t*5|t|tL", 128, 4)
    with pytest.raises(ConfigError, match=r"the schedule has 8 on 4 ranks \(--pp\); describe 8, or 4 parts"):
        stage_ranges(config, 8, "Et*6|t*6L", 128, 4)
