"""The dry run: exact where it counts parameters and states, and equal to published formulas elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from parallax.config import PretrainConfig, PretrainOptions
from parallax.data_parallel.options import ZERO_STAGES
from parallax.mesh import Mesh
from parallax.models.config import num_parameters
from parallax.objectives.next_token import NextToken
from parallax.precision.recipe import in_words
from parallax.resolve import read_options, resolve, world_size_of
from parallax.training.build import build_train_step
from parallax.training.plan import Plan, make_plan, print_plan
from tests.distributed.harness import run_layout

PUBLISHED = json.loads((Path(__file__).parents[1] / "oracles" / "published.json").read_text())
SMALL = "--tokenizer bytes --layers 8 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 16"


def config_of(words: str) -> PretrainConfig:
    options, problems = read_options(["--dry-run", *words.split()], PretrainOptions)
    assert problems == []
    return resolve(options, world_size_of(options))


def plan_of(words: str) -> Plan:
    return make_plan(config_of(words))


def test_one_rank_holds_the_whole_model() -> None:
    plan = plan_of("--model gpt2-124m --seq-len 1024")
    (stage,) = plan.ranks
    padding = (50304 - 50257) * 768
    assert stage.num_parameters == num_parameters(plan.config) + padding
    assert plan.bubble == 0
    assert (stage.traffic.tp, stage.traffic.pp, stage.traffic.dp) == (0, 0, 0)
    assert (stage.in_flight, stage.flops_share) == (1, 1)


def held_by_a_rank(mesh: Mesh, words: str) -> dict[str, int]:
    """Build the real thing and weigh it."""
    config = config_of(words)
    objective = NextToken(config.model_config.vocab_size, mesh.tp)
    step = build_train_step(
        mesh,
        config.model_config,
        config.stage_ranges,
        config.schedule,
        config.training,
        config.optimizer,
        objective,
        sequence_parallel=config.parallel.sp,
    )
    buckets = step.buckets.buckets
    names = [place.name for bucket in buckets for place in bucket.plan.places]
    pieces = [piece for name in names for piece in step.optimizer.pieces(name)]
    states = {
        state.data_ptr(): state
        for piece in pieces
        for state in map(torch.Tensor.untyped_storage, piece.tensors.values())
    }
    return {
        "weights": sum(bucket.shard.nbytes for bucket in buckets),
        "gradients": sum(bucket.main_grad.nbytes for bucket in buckets),
        "optimizer": sum(state.nbytes() for state in states.values()),
    }


CASES = [
    f"{SMALL} --tp 2 --pp 2 --dp 1 --sp --zero {zero} --precision {precision}"
    for zero in ZERO_STAGES
    for precision in ("fp32", "bf16")
]


def held_in_all_cases(mesh: Mesh) -> list[dict[str, int]]:
    return [held_by_a_rank(mesh, words) for words in CASES]


def test_model_states_are_exactly_what_a_run_allocates() -> None:
    plans = [plan_of(words) for words in CASES]
    for rank, row in enumerate(run_layout(plans[0].layout, held_in_all_cases)):
        for plan, held in zip(plans, row, strict=True):
            memory = plan.ranks[plan.layout.coordinates(rank)["pp"]].memory
            assert held == {name: getattr(memory, name) for name in held}


def test_tied_embeddings_are_held_by_the_first_and_the_last_stage() -> None:
    plan = plan_of("--model llama-1b --pp 4 --global-batch 16")
    doubled = 128256 * 2048
    assert sum(stage.num_parameters for stage in plan.ranks) == num_parameters(plan.config) + doubled


def test_sharded_states_shrink_with_data_parallelism_and_the_rest_does_not() -> None:
    one, eight = (plan_of(f"--model gpt2-124m --dp {dp} --global-batch 16").ranks[0].memory for dp in (1, 8))
    assert eight.optimizer == pytest.approx(one.optimizer / 8, rel=1e-3)
    assert eight.weights == pytest.approx(one.weights, rel=1e-3)


@pytest.mark.parametrize(("pp", "batch", "key"), [(4, 8, "p4_m8"), (4, 16, "p4_m16"), (8, 32, "p8_m32")])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_the_published_one(pp: int, batch: int, key: str, schedule: str) -> None:
    plan = plan_of(f"{SMALL} --pp {pp} --micro-batch 1 --global-batch {batch} --schedule {schedule}")
    assert plan.bubble == pytest.approx(PUBLISHED["worked_examples"]["bubble_share"][key])


def test_1f1b_keeps_fewer_micro_batches_than_gpipe() -> None:
    words = f"{SMALL} --pp 4 --micro-batch 1 --global-batch 8"
    assert [stage.in_flight for stage in plan_of(words).ranks] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in plan_of(f"{words} --schedule gpipe").ranks] == [8, 8, 8, 8]


def test_traffic_is_that_of_the_published_formulas() -> None:
    """8 b s h (t - 1) / t elements per layer and micro-batch along tp, b s h per boundary along pp, 2 N along dp."""
    plan = plan_of(f"{SMALL} --tp 2 --pp 4 --dp 2 --micro-batch 1 --global-batch 8 --zero 0")
    middle = plan.ranks[1]
    hidden, micro_batches, layers = 16 * 32 * 4, 4, len(middle.layers[0])
    assert middle.traffic.tp == micro_batches * layers * 8 * hidden // 2
    assert middle.traffic.pp == micro_batches * 2 * hidden
    assert plan.ranks[0].traffic.pp == plan.ranks[3].traffic.pp == micro_batches * hidden
    elements = middle.memory.gradients // 4
    tp_replicated = layers * 2 * 32  # the norms are summed over 4 holders, everything else over the 2 of dp
    assert middle.traffic.dp == 4 * round(2 * (elements - tp_replicated) / 2 + 2 * tp_replicated * 3 / 4)


def test_sequence_parallelism_sends_less_between_stages() -> None:
    words = f"{SMALL} --tp 2 --pp 2 --micro-batch 1 --global-batch 4"
    plain, split = plan_of(words).ranks[0], plan_of(f"{words} --sp").ranks[0]
    assert split.traffic.pp == plain.traffic.pp // 2
    assert split.memory.activations < plain.memory.activations


@pytest.mark.parametrize("tp", [2, 4])
def test_a_head_that_takes_chunks_of_tokens_keeps_its_gathered_input(tp: int) -> None:
    words = f"{SMALL} --tp {tp} --pp 2 --sp --micro-batch 1 --global-batch 4"
    whole, chunked = (plan_of(f"{words} --loss-chunk {chunk}").ranks[1] for chunk in (16, 8))
    gather = 16 * 32 * 4 * (tp - 1) // tp
    of_layers = 10 * len(whole.layers[0])
    micro_batches = 4
    assert whole.traffic.tp == micro_batches * (of_layers + 3) * gather
    assert chunked.traffic.tp == micro_batches * (of_layers + 2) * gather


def test_the_largest_model_on_16384_ranks_takes_seconds() -> None:
    started = time.perf_counter()
    plan = plan_of(
        "--world-size 16384 --model llama3-405b --tp 8 --pp 16 --sp --seq-len 8192 --micro-batch 1 --global-batch 2048 "
        "--precision bf16"
    )
    assert time.perf_counter() - started < 10
    assert plan.layout.dp == 128
    assert plan.tokens_per_step == 2**24  # as published: 16M
    assert plan.ranks[3].ranks == (3 * 1024, 4 * 1024 - 1)
    # Every tp rank holds all norms: two of each layer, and the last one. Embedding and head are padded by half a 64 * 8.
    replicated, padding = (2 * 126 + 1) * 16384, 2 * 256 * 16384
    assert (
        sum(stage.num_parameters for stage in plan.ranks) * 8 == num_parameters(plan.config) + 7 * replicated + padding
    )
    assert max(stage.memory.total for stage in plan.ranks) < 80 * 2**30  # it ran on such GPUs


def test_the_plan_is_printed_whole_by_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("--world-size 16384 --tp 8 --pp 8 --model llama3-8b --global-batch 512 --micro-batch 1")
    print_plan(config)
    shown = capsys.readouterr().out
    assert "16,384 ranks = tp 8 x pp 8 x dp 256" in shown
    assert "parameters: 8,030,261,248; per rank" in shown
    assert "…" not in shown
    monkeypatch.setenv("RANK", "1")
    print_plan(config)
    assert capsys.readouterr().out == ""


def test_the_plan_says_how_layers_run_in_fp8_and_what_would_compute_on_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of("--model tiny --precision fp8 --fp8-keep layers.0 --fp8-format hybrid")
    print_plan(config)
    shown = capsys.readouterr().out
    table = in_words(config.fp8_layers or {})
    assert any("dgrad e5m2 1x128 x e4m3 128x128" in line for line in table) and any("bf16" in line for line in table)
    for line in table:
        assert f"  {line}\n" in shown
    assert "\nfp8: on this machine " in shown
    of_fp8 = make_plan(config).ranks[0].memory
    assert f"{of_fp8.weights / 2**20:.2f}        {of_fp8.fp8_weights / 2**20:.2f}" in shown
    assert "  weights  fp8 weights  gradients  " in shown
    print_plan(config_of("--model tiny --precision bf16"))
    assert "fp8" not in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_backend_that_cannot_run_here_is_told_and_does_not_end_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(config_of("--model tiny --precision fp8 --fp8-backend te --fp8-recipe delayed --world-size 8 --dp 8"))
    shown = capsys.readouterr().out
    assert "fp8: not on this machine: --fp8-backend te: needs an NVIDIA GPU, and this run is on cpu" in shown
    assert "\n  model.layers.0-7.mlp.down_proj     e4m3 tensor x e4m3 tensor\n" in shown
    assert "Memory of each rank" in shown


def test_copies_of_weights_in_fp8_are_those_of_the_backend_that_was_asked_for_also_where_it_cannot_run() -> None:
    words = "--model llama3-8b --precision fp8 --fp8-scales pow2 --tp 8 --pp 4 --micro-batch 1 --global-batch 4"
    reference, te = (
        [rank.memory for rank in plan_of(f"{words} --fp8-backend {name}").ranks] for name in ("reference", "te")
    )
    # Of the layers' matrices, 32 of 218,103,808 elements: 9 bytes of each, or 2, and the scales of tiles.
    for memory, each in ((reference, 9), (te, 2)):
        assert sum(one.fp8_weights for one in memory) == pytest.approx(each * 32 * 218_103_808 / 8, rel=1e-3)
        assert memory[1].total - memory[1].fp8_weights == reference[1].total - reference[1].fp8_weights


def test_the_plan_says_why_auto_chose_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("--world-size 4 --pp 4 --schedule auto --model tiny")
    print_plan(config)
    assert f"schedule: {config.why_schedule}" in capsys.readouterr().out
