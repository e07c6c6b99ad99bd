"""pretrain.py with --precision fp8: what it says, what it saves, and going on where it stopped."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from parallax.config import PretrainOptions
from parallax.mesh import Layout, Mesh
from parallax.precision.recipe import Recipe, in_words, matches
from parallax.resolve import check, read_options
from parallax.tensor_parallel.linear import RowParallelLinear
from parallax.training.metrics import Metrics
from tests.distributed.harness import run_layout
from tests.training import runs
from tests.training.runs import MODEL, before_data, contents, metrics, saved, scale_loss_at, write_text

# Shares of 2 ranks are multiples of 16, as delayed scaling needs them.
run = partial(runs.run, model=MODEL.replace("--hidden 32", "--hidden 64").replace("--ffn 48", "--ffn 96"))
ALWAYS = (
    "--precision fp8 --fp8-recipe delayed --fp8-format hybrid --fp8-amax-history 3 --fp8-keep layers.0 "
    "--eval-every 2 --eval-steps 1 --lr-decay-steps 4 --warmup-steps 1"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), *(pytest.param(one, marks=pytest.mark.slow) for one in (Layout(), Layout(pp=2)))], ids=str
)
def test_four_steps_equal_two_and_two_more_bit_for_bit_scales_included(layout: Layout, folder: Path) -> None:
    always = f"{ALWAYS} --tp {layout.tp} --pp {layout.pp}"
    commands = [
        f"{always} --out {folder}/whole --steps 4",
        f"{always} --out {folder}/parts --steps 2",
        f"{always} --out {folder}/parts --steps 4",
    ]
    assert run_layout(layout, run, commands, str(folder), timeout=120) == [[[], [], []]] * layout.world_size
    whole, parts = metrics(folder / "whole"), metrics(folder / "parts")
    assert [row["loss"] for row in whole] == [row["loss"] for row in parts]
    last = "checkpoints/step-00000004"
    assert contents(folder / "whole" / last) == contents(folder / "parts" / last)
    states = [json.loads((folder / name / last / "state.json").read_text())["training"] for name in ("whole", "parts")]
    assert states[0]["fp8"] == states[1]["fp8"]
    assert len(states[0]["fp8"]["layers"]) == 7  # those of layer 1
    assert states[0]["identity"]["fp8_layers"]["model.layers.0.mlp.up_proj"]["fprop"] == "bf16"


def test_another_layout_goes_on_with_the_same_losses_and_scales(folder: Path) -> None:
    whole, parts = folder / "whole", folder / "parts"
    commands = [f"{ALWAYS} --out {whole} --steps 4", f"{ALWAYS} --out {parts} --steps 2"]
    run_layout(Layout(), run, commands, str(folder), timeout=120)
    run_layout(Layout(tp=2, pp=2), run, [f"{ALWAYS} --tp 2 --pp 2 --out {parts} --steps 4"], str(folder), timeout=120)
    for row, other in zip(metrics(whole), metrics(parts), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
    scales = [
        json.loads((out / "checkpoints/step-00000004/state.json").read_text())["training"]["fp8"]
        for out in (whole, parts)
    ]
    assert scales[0] == scales[1]


@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(tp=2, dp=2), marks=pytest.mark.slow)], ids=str)
def test_a_skipped_step_leaves_scales_and_histories_as_they_were(layout: Layout, folder: Path) -> None:
    command = f"{ALWAYS} --tp {layout.tp} --out {folder}/run --steps 6 --save-every 1 --on-bad-step skip"
    last = layout.world_size - 1
    trouble = partial(scale_loss_at, steps=(0, 3), factor=math.nan, rank=last)
    assert run_layout(layout, run, [command], str(folder), trouble, timeout=120) == [[[]]] * layout.world_size
    checkpoints = [folder / "run/checkpoints" / name for name in saved(folder / "run")]
    scales = [json.loads((path / "state.json").read_text())["training"]["fp8"] for path in checkpoints]
    assert [one["num_updates"] for one in scales] == [0, 1, 2, 2, 3, 4]
    assert scales[2] == scales[3] != scales[4]
    untouched = {"scale": 1.0, "amax_history": [0.0] * 3}
    assert all(tensor == untouched for layer in scales[0]["layers"].values() for tensor in layer.values())
    assert contents(checkpoints[2]) == contents(checkpoints[3]) != contents(checkpoints[4])


def _spoil_a_value(mesh: Mesh, said: str) -> None:
    """Make one input of layer 1's row-parallel layers infinite in the second step: FP8 saturates, so the loss stays finite.

    said: the file that takes what the run says.
    """
    current = [-1]
    before_data(lambda loader, step: current.__setitem__(0, step if loader.order.shuffle else -1))
    plain = RowParallelLinear.forward

    def forward(self: RowParallelLinear, input: torch.Tensor) -> torch.Tensor:
        if current[0] == 1 and self.products is not None:
            input = input.index_put((torch.tensor(0),) * 3, input.new_tensor(math.inf))
        return plain(self, input)

    def say(self: Metrics, text: str) -> None:
        if self.enabled:
            with open(said, "a") as file:
                file.write(f"{text}\n")

    RowParallelLinear.forward = forward  # type: ignore[method-assign]
    Metrics.say = say  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(tp=2), marks=pytest.mark.slow)], ids=str)
def test_an_infinite_amax_is_told_once_with_its_step(layout: Layout, folder: Path) -> None:
    command = f"{ALWAYS} --tp {layout.tp} --out {folder}/run --steps 3"
    trouble = partial(_spoil_a_value, said=f"{folder}/said.txt")
    assert run_layout(layout, run, [command], str(folder), trouble, timeout=120) == [[[]]] * layout.world_size
    (line,) = [line for line in (folder / "said.txt").read_text().splitlines() if "amaxes" in line]
    # Of the inputs of o_proj and of down_proj.
    assert "step 2: amaxes that are infinite or not a number: 2; their scales stay as they are for the next 3" in line


def test_another_recipe_is_another_run_and_another_backend_is_not(folder: Path) -> None:
    base = f"--precision fp8 --out {folder}/run --eval-every 0 --lr-decay-steps 4"
    commands = [
        f"{base} --steps 1",
        f"{base} --steps 2 --fp8-format hybrid",
        f"{base} --steps 2 --fp8-backend reference",
    ]
    ((first, changed, backend),) = run_layout(Layout(), run, commands, str(folder), timeout=120)
    assert first == backend == []
    assert any("fp8-format was e4m3 and is now hybrid" in problem for problem in changed)


def problems_of(words: str, world_size: int = 1) -> list[str]:
    options, problems = read_options(words.split(), PretrainOptions)
    return problems + check(options, world_size)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--fp8-recipe tile", "--fp8-recipe has no effect with --precision fp32; leave it out, or use --precision fp8"),
        ("--precision bf16 --fp8-margin 0", "--fp8-margin has no effect with --precision bf16"),
        ("--precision bf16 --fp8-margin 1", "--fp8-margin has no effect with --precision bf16"),
        ("--precision fp8 --fp8-backend triton --kernels off", "--fp8-backend triton computes with our kernels, which"),
        ("--precision fp8 --fp8-margin 1", "--fp8-margin 1 has no effect with --fp8-recipe tile"),
        ("--precision fp8 --fp8-recipe delayed --fp8-scales pow2", "--fp8-scales pow2 goes with --fp8-recipe tile"),
        ("--precision fp8 --fp8-recipe delayed --fp8-amax-history 0", "must be between 1 and 4096"),
        (
            "--precision fp8 --ffn 680",
            "multiples of 16, and 680 (of model.layers.0.mlp.gate_proj) is none; use 672 or 688",
        ),
        ("--precision fp8 --seq-len 100", "--seq-len to be a multiple of 16, not 100; use 96 or 112"),
        ("--precision fp8 --fp8-keep layer.0", "--fp8-keep layer.0 names no layer"),
        ("--precision fp8 --fp8-keep *", "leaves no layer in FP8"),
        ("--precision fp8 --tp 8 --kv-heads 4", "use --tp 4 or less, or --fp8-keep k_proj v_proj"),
        ("--precision fp8 --tp 8 --kv-heads 4 --fp8-keep k_proj", "or --fp8-keep v_proj"),
        ("--precision fp8 --tp 8 --kv-heads 4 --fp8-keep layers.0.self_attn", "or --fp8-keep k_proj v_proj"),
        (
            "--precision fp8 --fp8-recipe delayed --tp 2 --fp8-backend reference",
            "--fp8-recipe delayed needs tensor-parallel shares that are multiples of 16, and --tp 2 makes them 344 (of "
            "model.layers.0.mlp.gate_proj); use another --tp, sizes that divide by 32, --fp8-recipe tile, "
            "or --fp8-keep gate_proj up_proj down_proj",
        ),
        ("--precision fp8 --fp8-recipe mx", "--fp8-recipe mx is unknown; use tile or delayed"),
    ],
)
def test_what_cannot_run_in_fp8_is_said_before_anything_is_built(words: str, sentence: str) -> None:
    assert any(sentence in problem for problem in problems_of(words, 8)), problems_of(words, 8)


def test_sizes_that_tensor_parallelism_cuts_inside_a_tile_are_taken() -> None:
    assert problems_of("--precision fp8 --tp 2", 2) == []
    for delayed in ("--ffn 704", "--fp8-keep mlp", "--fp8-keep gate_proj up_proj down_proj"):
        assert problems_of(f"--precision fp8 --fp8-recipe delayed --tp 2 {delayed}", 2) == []


@pytest.mark.parametrize("recipe", ["tile", "delayed"])
def test_sizes_that_do_not_divide_over_the_ranks_are_told_of_the_model_alone(recipe: str) -> None:
    problems = problems_of(f"--precision fp8 --fp8-recipe {recipe} --tp 5", 5)
    assert problems and not any("fp8" in problem for problem in problems), problems


@pytest.mark.parametrize(
    "keep",
    ["k_proj v_proj", "self_attn", "*.k_proj *.v_proj", "self_attn.k_proj self_attn.v_proj", "model.layers.*_attn"],
)
def test_ranks_may_share_a_key_value_head_whose_layers_are_kept_however_they_are_named(keep: str) -> None:
    assert problems_of(f"--precision fp8 --tp 8 --kv-heads 4 --fp8-keep {keep}", 8) == []


def test_a_pattern_names_a_layer_or_a_part_of_its_name() -> None:
    layer = "model.layers.12.mlp.down_proj"
    for pattern in ("down_proj", "layers.12", "layers.1?", "mlp.*", layer, "*down*"):
        assert matches(pattern, layer), pattern
    for pattern in ("layers.1", "down", "layers.2", "proj"):
        assert not matches(pattern, layer), pattern


def test_the_table_says_how_each_product_of_each_layer_runs() -> None:
    layers = [f"model.layers.{i}.mlp.{name}" for i in range(4) for name in ("up_proj", "down_proj")] + ["lm_head"]
    table = Recipe(fp8_format="hybrid", keep=("layers.0", "layers.3")).table(layers)
    fp8 = {
        "fprop": "e4m3 1x128 x e4m3 128x128",
        "dgrad": "e5m2 1x128 x e4m3 128x128",
        "wgrad": "e5m2 128x1 x e4m3 128x1",
    }
    kept = dict.fromkeys(fp8, "bf16")
    expected = {layer: fp8 if ".1." in layer or ".2." in layer else kept for layer in layers}
    assert table == expected
    assert [line.split("  ")[0] for line in in_words(table)] == [
        "model.layers.0,3.mlp.up_proj",
        "model.layers.0,3.mlp.down_proj",
        "model.layers.1-2.mlp.up_proj",
        "model.layers.1-2.mlp.down_proj",
        "lm_head",
    ]
