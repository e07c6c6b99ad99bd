"""Delayed scaling against a list of numbers that is kept by hand."""

from __future__ import annotations

import math
import random
import warnings

import numpy as np
import pytest
import torch

from parallax.precision import DelayedScaling


@pytest.mark.filterwarnings("ignore:amaxes that are infinite")
def test_the_trace_of_transformer_engine_is_reproduced() -> None:
    scaling, scales = DelayedScaling(amax_history_len=4), []
    assert scaling.scale.item() == 1
    for amax in (1, 8, 2, 1, 1, 1, math.inf, 1, 0, 0):
        scaling.update(amax)
        scales.append(scaling.scale.item())
    assert scales == [448, 56, 56, 56, 56, 224, 224, 224, 224, 224]


@pytest.mark.filterwarnings("ignore:amaxes that are infinite")
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize(("fp8_format", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
@pytest.mark.parametrize("margin", [0, 2])
def test_scales_follow_a_window_kept_by_hand(
    algorithm: str, length: int, fp8_format: str, largest: float, margin: int
) -> None:
    draw, window, scale = random.Random(0), [], 1.0
    scaling = DelayedScaling(length, margin, fp8_format, algorithm)
    for _ in range(40):
        amax = draw.choice([0.0, math.inf, math.nan, draw.lognormvariate(0, 3), draw.lognormvariate(0, 3)])
        window = [float(np.float32(amax)), *window][:length]
        scaling.update(amax)
        greatest = window[0] if algorithm == "most_recent" or any(map(math.isnan, window)) else max(window)
        greatest = math.nan if algorithm == "max" and any(map(math.isnan, window)) else greatest
        if math.isfinite(greatest) and greatest > 0:
            scale = float(np.float32(largest) / np.float32(greatest) / np.float32(2**margin))
        assert scaling.scale.item() == scale


def test_an_infinite_amax_is_told_and_holds_the_scale_only_as_long_as_the_history() -> None:
    scaling = DelayedScaling(amax_history_len=3)
    scaling.update(1.0)
    with pytest.warns(UserWarning, match=r"infinite or not a number: 1; .* stay as they are for the next 3 steps"):
        scaling.update(math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for expected in (448, 448, 448 / 4):
            scaling.update(4.0)
            assert scaling.scale.item() == expected


def test_the_warning_of_an_infinite_amax_points_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="infinite") as told:
        DelayedScaling().update(math.inf)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("fp8_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("amax", [1e-45, 1e-30, torch.finfo(torch.float32).max])
def test_no_margin_takes_a_scale_or_its_reciprocal_out_of_range(fp8_format: str, amax: float) -> None:
    for margin in range(9):
        scaling = DelayedScaling(1, margin, fp8_format)
        scaling.update(amax)
        assert 0 < scaling.scale.item() < math.inf and 0 < scaling.scale_inv.item() < math.inf


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_step_that_does_not_count_leaves_everything_as_it_was(algorithm: str) -> None:
    scaling, other = (DelayedScaling(3, algorithm=algorithm, shape=(2,)) for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    for step in range(8):
        amax = torch.rand(2, generator=draw)
        if step % 3 == 0:
            scaling.advance(amax * 100, skip=torch.ones(()))
            scaling.advance(torch.full((2,), math.nan), skip=torch.ones(()))
        scaling.advance(amax, skip=torch.zeros(()))
        other.update(amax)
        assert torch.equal(scaling.scale, other.scale) and torch.equal(scaling.amax_history, other.amax_history)
        assert int(scaling.num_updates) == step + 1


def test_many_tensors_are_kept_side_by_side_as_if_each_had_its_own() -> None:
    together, apart = DelayedScaling(3, shape=(5,)), [DelayedScaling(3) for _ in range(5)]
    for step in range(6):
        amaxes = torch.rand(5, generator=torch.Generator().manual_seed(step)) * 10**step
        together.update(amaxes)
        for one, amax in zip(apart, amaxes, strict=True):
            one.update(amax)
    assert torch.equal(together.scale, torch.stack([one.scale for one in apart]))


def test_a_state_goes_on_bit_for_bit() -> None:
    first, second = DelayedScaling(4, shape=(3,)), DelayedScaling(4, shape=(3,))
    for step in range(5):
        first.update(torch.rand(3, generator=torch.Generator().manual_seed(step)))
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        first.update(torch.full((3,), 0.1))
        second.update(torch.full((3,), 0.1))
        assert torch.equal(first.scale, second.scale) and torch.equal(first.amax_history, second.amax_history)
    with pytest.raises(ValueError, match=r"scale was saved with the shape \[3\], and is \[2\] here"):
        DelayedScaling(4, shape=(2,)).load_state_dict(first.state_dict())


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="amax_history_len=0 must be at least 1"):
        DelayedScaling(0)
    with pytest.raises(ValueError, match=r"amax_history_len=2\.5 must be at least 1, and a whole number"):
        DelayedScaling(2.5)  # type: ignore[arg-type]
    for margin in (-1, 9, 200, 2000, 1.5):
        with pytest.raises(ValueError, match=f"margin={margin} must be between 0 and 8, and a whole number"):
            DelayedScaling(margin=margin)  # type: ignore[arg-type]
    for shape, amax in (((), torch.ones(1)), ((), [1.0, 2.0]), ((3,), torch.ones(1)), ((3,), torch.ones(2, 3))):
        with pytest.raises(ValueError, match=r"amax has the shape \[[\d, ]+\], and the scales have"):
            DelayedScaling(shape=shape).update(amax)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the FP8 format \['e4m3'\] is unknown"):
        DelayedScaling(fp8_format=["e4m3"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mean' is unknown; use 'max' or 'most_recent'"):
        DelayedScaling(algorithm="mean")
    for negative in (-1.0, [1.0, -0.5]):
        with pytest.raises(ValueError, match=r"an amax of -[\d.]+ is below 0; pass the greatest magnitude"):
            DelayedScaling(shape=(2,)).update(negative)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"amax is 'one', which makes no tensor"):
        DelayedScaling().update("one")  # type: ignore[arg-type]
    for shape in (3, None, "3"):
        with pytest.raises(TypeError, match=rf"shape={shape!r} must be a tuple of sizes, as in \(3,\)"):
            DelayedScaling(shape=shape)  # type: ignore[arg-type]
    for sizes in ((-1,), (2.0,), (True,)):
        with pytest.raises(ValueError, match="must hold whole numbers of at least 0"):
            DelayedScaling(shape=sizes)  # type: ignore[arg-type]


def test_a_state_that_does_not_fit_leaves_everything_as_it_was() -> None:
    scaling, other = DelayedScaling(3, shape=(2,)), DelayedScaling(3, shape=(2,))
    scaling.update(torch.tensor([1.0, 2.0]))
    other.update(torch.tensor([3.0, 4.0]))
    before, state = scaling.state_dict(), other.state_dict()
    for wrong, said in (
        ({"amax_history": torch.zeros(4, 2)}, r"amax_history was saved with the shape \[4, 2\]"),
        ({"amax_history": [1.0]}, "amax_history was saved as list, and is a tensor here"),
        ({"num_updates": -1}, "num_updates was saved as -1"),
        ({"num_updates": "x"}, "num_updates was saved as 'x'"),
        ({"num_updates": 10**30}, "num_updates was saved as 10{30}"),
        ({"num_updates": None}, "num_updates was saved as None"),
        ({"num_updates": [1]}, r"num_updates was saved as \[1\]"),
        ({"num_updates": torch.tensor(1.5)}, r"num_updates was saved as tensor\(1.5000\)"),
        *(
            ({"scale": torch.tensor([1.0, bad])}, "scale was saved with numbers that are not finite and above 0")
            for bad in (math.nan, 0.0, -1.0, math.inf)
        ),
        ({"scale": torch.ones(2, dtype=torch.float64) * 1e300}, "scale was saved with numbers that are not finite"),
        ({"scale": torch.ones(2, dtype=torch.complex64)}, "scale was saved as torch.complex64"),
        ({"amax_history": torch.zeros(3, 2, dtype=torch.complex64)}, "amax_history was saved as torch.complex64"),
        ({"amax_history": torch.full((3, 2), -1.0)}, "amax_history was saved with numbers that are below 0 or NaN"),
        ({"amax_history": torch.full((3, 2), math.nan)}, "amax_history was saved with numbers that are below 0 or NaN"),
    ):
        with pytest.raises(ValueError, match=said):
            scaling.load_state_dict(state | wrong)
    with pytest.raises(ValueError, match="num_updates is missing in the state"):
        scaling.load_state_dict({name: state[name] for name in ("scale", "amax_history")})
    after = scaling.state_dict()
    assert all(torch.equal(torch.as_tensor(after[name]), torch.as_tensor(before[name])) for name in before)


@pytest.mark.filterwarnings("ignore:amaxes that are infinite")
def test_every_state_that_updates_make_can_be_loaded() -> None:
    for algorithm in ("max", "most_recent"):
        scaling, other = (DelayedScaling(3, 8, algorithm=algorithm) for _ in range(2))
        for amax in (math.nan, math.inf, 0.0, 1e-45, 3.4e38, 1.0):
            scaling.update(amax)
            other.load_state_dict(scaling.state_dict())
            assert torch.equal(other.scale, scaling.scale) and torch.equal(other.amax_history, scaling.amax_history)


def test_a_state_that_is_loaded_is_copied() -> None:
    scaling = DelayedScaling(2)
    scaling.update(1.0)
    state = scaling.state_dict()
    scaling.load_state_dict(state)
    state["scale"].zero_()
    state["amax_history"].fill_(7.0)
    assert scaling.scale.item() == 448 and scaling.amax_history.tolist() == [0.0, 1.0]
