"""The bucket plan is pure: its properties hold for any parameters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.data_parallel.plan import ALIGNMENT, BucketKey, ParameterSize, bucket_key, plan_buckets
from parallax.mesh import Layout, Replicas
from parallax.tensor_parallel.facts import ParameterFacts

ONE = BucketKey((0,), 1.0, "torch.float32")
KEYS = (
    ONE,
    BucketKey((0, 1, 2), 1.0, "torch.float32"),
    BucketKey((0, 1, 2), 1 / 3, "torch.float32"),
    BucketKey((0, 1, 2, 3), 1.0, "torch.bfloat16"),
    BucketKey((0, 4), 1.0, "torch.float32", across_stages=True),
)

ANY_SPEED = settings(deadline=None)  # other processes may be using the cores


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSize]:
    rows = draw(st.lists(st.tuples(st.integers(0, 300), st.sampled_from(KEYS), st.booleans()), max_size=40))
    return [ParameterSize(f"p{i}", numel, key, decays) for i, (numel, key, decays) in enumerate(rows)]


@ANY_SPEED
@given(models(), st.integers(1, 400))
def test_every_parameter_has_one_place_of_its_size_and_places_do_not_overlap(
    model: list[ParameterSize], limit: int
) -> None:
    plan = plan_buckets(model, limit)
    places = {place.name: place for bucket in plan for place in bucket.places}
    assert sum(len(bucket.places) for bucket in plan) == len(places) == len(model)
    for parameter in model:
        assert places[parameter.name].numel == parameter.numel
    for bucket in plan:
        position = 0
        for place in bucket.places:
            assert place.offset >= position and place.offset % ALIGNMENT == 0
            position = place.stop
        assert position <= bucket.size


@ANY_SPEED
@given(models(), st.integers(1, 400))
def test_owned_slices_are_equal_and_aligned_and_cover_the_bucket(model: list[ParameterSize], limit: int) -> None:
    for bucket in plan_buckets(model, limit):
        ranks = len(bucket.key.holders)
        slices = [bucket.owned(rank) for rank in range(ranks)]
        assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])]
        assert slices[-1].stop == bucket.size
        assert {part.stop - part.start for part in slices} == {bucket.size // ranks}
        assert bucket.size // ranks % ALIGNMENT == 0
        used = sum(-(-place.numel // ALIGNMENT) * ALIGNMENT for place in bucket.places)
        assert bucket.size - used < ranks * ALIGNMENT, "padding beyond what alignment needs"


@ANY_SPEED
@given(models(), st.integers(1, 400))
def test_a_bucket_holds_one_key_and_what_decays_comes_first(model: list[ParameterSize], limit: int) -> None:
    by_name = {parameter.name: parameter for parameter in model}
    for bucket in plan_buckets(model, limit):
        for place in bucket.places:
            assert by_name[place.name].key == bucket.key
            assert by_name[place.name].decays == (place.offset < bucket.decay_stop) or place.numel == 0
            assert place.stop <= bucket.decay_stop or not by_name[place.name].decays


@ANY_SPEED
@given(models(), st.integers(1, 400))
def test_a_bucket_grows_beyond_the_limit_only_for_one_large_parameter(model: list[ParameterSize], limit: int) -> None:
    for bucket in plan_buckets(model, limit):
        used = sum(-(-place.numel // ALIGNMENT) * ALIGNMENT for place in bucket.places)
        assert used <= limit or sum(place.numel > 0 for place in bucket.places) == 1


@ANY_SPEED
@given(models(), st.integers(1, 400))
def test_buckets_come_in_the_order_of_completion_and_those_across_stages_last(
    model: list[ParameterSize], limit: int
) -> None:
    position = {parameter.name: i for i, parameter in enumerate(model)}
    plan = plan_buckets(model, limit)
    late = [bucket.key.across_stages for bucket in plan]
    assert late == sorted(late)
    for group in ([b for b in plan if not b.key.across_stages], [b for b in plan if b.key.across_stages]):
        completed = [min(position[place.name] for place in bucket.places) for bucket in group]
        assert completed == sorted(completed, reverse=True)


@ANY_SPEED
@given(models(), st.integers(1, 400), st.sampled_from(KEYS))
def test_buckets_of_a_key_do_not_depend_on_parameters_of_other_keys(
    model: list[ParameterSize], limit: int, key: BucketKey
) -> None:
    def mine(parameters: list[ParameterSize]) -> list:
        return [bucket for bucket in plan_buckets(parameters, limit) if bucket.key == key]

    assert mine(model) == mine([parameter for parameter in model if parameter.key == key])


def test_later_layers_fill_the_first_bucket() -> None:
    model = [ParameterSize(f"layer{i}", 32, ONE) for i in range(4)]
    assert [[place.name for place in bucket.places] for bucket in plan_buckets(model, 64)] == [
        ["layer3", "layer2"],
        ["layer1", "layer0"],
    ]


def test_matrices_and_norms_of_a_model_share_one_reduction() -> None:
    model = [ParameterSize("norm", 5, ONE, decays=False), ParameterSize("matrix", 20, ONE)]
    (bucket,) = plan_buckets(model)
    assert [(place.name, place.offset) for place in bucket.places] == [("matrix", 0), ("norm", 32)]
    assert (bucket.decay_stop, bucket.size) == (32, 48)


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="one name"):
        plan_buckets([ParameterSize("w", 1, ONE), ParameterSize("w", 2, ONE)])


def test_the_key_says_who_holds_a_parameter_and_how_its_gradient_is_summed() -> None:
    layout = Layout(tp=2, pp=2, dp=2)

    def key(**facts: object) -> BucketKey:
        return bucket_key(ParameterFacts((8,), **facts), layout, 1, "torch.float32")  # type: ignore[arg-type]

    sharded, replicated = key(), key(replicas=Replicas(tp=2))
    assert (sharded.holders, sharded.scale, sharded.across_stages) == ((1, 3), 1.0, False)
    assert (replicated.holders, replicated.scale) == ((0, 1, 2, 3), 0.5)
    assert key(replicas=Replicas(tp=2), partial=True).scale == 1.0
    tied = key(replicas=Replicas(stages=(0, 1)))
    assert (tied.holders, tied.across_stages) == ((1, 3, 5, 7), True)
