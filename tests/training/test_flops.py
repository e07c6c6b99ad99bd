"""Model FLOPs against published figures, and the peaks of devices."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallax.models.config import DecoderConfig, flops_per_token, num_parameters
from parallax.models.presets import PRESETS
from parallax.training import flops as of_training
from parallax.training.flops import Work, gpu_peak_flops, measured_flops, mfu, peak_flops, share_of_cores, work_of

PUBLISHED = json.loads((Path(__file__).parents[1] / "oracles" / "published.json").read_text())
DENSE = ["llama3_8b", "llama3_70b", "llama3_405b", "smollm2_135m", "qwen2_5_72b"]


def config_of(name: str) -> DecoderConfig:
    sizes: dict[str, Any] = PUBLISHED["models"][name]
    return DecoderConfig(
        vocab_size=sizes["V"],
        hidden_size=sizes["h"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["L"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv"],
        head_dim=sizes["hd"],
        tie_word_embeddings=bool(sizes.get("tied")),
    )


@pytest.mark.parametrize("name", DENSE)
def test_parameters_and_operations_equal_the_published_ones(name: str) -> None:
    config, sizes = config_of(name), PUBLISHED["models"][name]
    assert num_parameters(config) == sizes["params"]
    for length, flops in sizes["train_flops_per_token_causal"].items():
        assert flops_per_token(config, int(length)) == pytest.approx(flops, rel=1e-12)


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_405b"])
def test_the_presets_are_the_published_models(name: str) -> None:
    preset = PRESETS[name.replace("_", "-")].resolved()
    assert num_parameters(preset) == PUBLISHED["models"][name]["params"]
    assert flops_per_token(preset, 8192) == PUBLISHED["models"][name]["train_flops_per_token_causal"]["8192"]


def test_gpt3_has_its_published_size() -> None:
    assert num_parameters(PRESETS["gpt3-175b"].resolved()) / 1e9 == pytest.approx(
        PUBLISHED["gpt3_175b"]["formula_params_B"], abs=0.05
    )


@pytest.mark.parametrize(
    "row", [row for row in PUBLISHED["megatron_bridge"]["rows"] if row["model"] in DENSE], ids=lambda row: row["model"]
)
def test_operations_agree_with_measured_rates_of_megatron_bridge(row: dict[str, Any]) -> None:
    # Both columns are printed with three or four digits.
    published = row["model_tflops_per_gpu"] * 1e12 / row["tokens_per_s_per_gpu"]
    assert flops_per_token(config_of(row["model"]), row["seq"]) == pytest.approx(published, rel=2e-3)


def test_operations_count_grouped_queries_the_gate_and_the_length() -> None:
    """Each of these was left out of the count somewhere (Megatron-LM 682 and 1565)."""
    base = DecoderConfig(num_key_value_heads=8).resolved()
    fewer = DecoderConfig(num_key_value_heads=2).resolved()
    saved = 6 * base.num_hidden_layers * 2 * base.hidden_size * (base.key_value_size - fewer.key_value_size)
    assert flops_per_token(base, 128) - flops_per_token(fewer, 128) == saved
    wider = DecoderConfig(num_key_value_heads=8, intermediate_size=1376).resolved()
    assert flops_per_token(wider, 128) - flops_per_token(base, 128) == 6 * 8 * 3 * 256 * 688
    assert flops_per_token(base, 256) - flops_per_token(base, 128) == 6 * 8 * 256 * 128  # causal: half of 12 L h s


def test_the_look_up_of_an_embedding_is_no_operation() -> None:
    tied, untied = (DecoderConfig(tie_word_embeddings=tie).resolved() for tie in (True, False))
    assert num_parameters(untied) > num_parameters(tied)
    assert flops_per_token(untied, 128) == flops_per_token(tied, 128)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80G-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H800", "H800-SXM"),
        ("NVIDIA B200", "B200-HGX"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_peaks_are_dense_and_those_of_the_data_sheets(name: str, key: str) -> None:
    assert gpu_peak_flops(name) == pytest.approx(PUBLISHED["hardware"][key]["bf16_dense_tflops"] * 1e12, rel=1e-3)


def test_names_of_boards_are_told_apart() -> None:
    assert gpu_peak_flops("NVIDIA H100 PCIe") == 756e12
    assert gpu_peak_flops("NVIDIA H100 NVL") == 835e12
    assert gpu_peak_flops("NVIDIA A10G") == 70e12
    assert gpu_peak_flops("NVIDIA A10") == 125e12
    assert gpu_peak_flops("NVIDIA L40S") == 362e12
    assert gpu_peak_flops("NVIDIA GeForce RTX 4090") == 165.2e12
    assert gpu_peak_flops("NVIDIA L400") is None


def test_work_counts_the_squares_of_documents_and_no_padding() -> None:
    """Rows of documents of 3 and 2 tokens, and of 4, each padded to 8: not two squares of 8 (NeMo-RL 2790)."""
    labels = torch.tensor([[-100, 1, -100, 1, -100, -100, -100, -100], [1, 1, 1, -100, -100, -100, -100, -100]])
    assert work_of(labels, (3, 2, 3, 4, 4)) == Work(targets=5, tokens=9, squares=9 + 4 + 16)
    assert work_of(torch.ones(6, 8, dtype=torch.int64)) == Work(48, 48, 6 * 64)
    model = DecoderConfig().resolved()
    assert Work(48, 48, 6 * 64).flops(model) == 48 * flops_per_token(model, 8)


def test_the_worked_example_of_utilisation() -> None:
    assert mfu(1000 * 6 * 70e9, 8 * 312e12) == pytest.approx(
        PUBLISHED["worked_examples"]["mfu_70B_8xA100_1000tok_s"]["value"]
    )


@pytest.mark.parametrize("row", PUBLISHED["llama3_405b"]["check"][:2], ids=lambda row: str(row["gpus"]))
def test_utilisation_of_llama3_405b_follows_from_its_rate(row: dict[str, float]) -> None:
    implied = PUBLISHED["llama3_405b"]["implied_tokens_per_s_per_gpu"]
    rate = implied["8K@430" if row["gpus"] == 8192 else "8K@400"] * row["gpus"]
    share = mfu(rate * flops_per_token(config_of("llama3_405b"), 8192), row["gpus"] * 989.4e12)
    assert 100 * share == pytest.approx(row["mfu"], abs=0.1)


def test_the_peak_of_a_cpu_is_measured_quickly_and_is_plausible() -> None:
    peak = measured_flops(torch.device("cpu"), torch.float32, sizes=(256,), budget_seconds=0.05)
    assert 1e8 < peak < 1e14
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e8


def test_the_peak_is_that_of_the_core_though_something_else_takes_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    wall, ours = [0.0], [0.0]

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        ours[0] += 2 * len(left) ** 3 / 100e9 * torch.get_num_threads()
        wall[0] += 2 * len(left) ** 3 / 7e9

    monkeypatch.setattr(torch, "mm", mm)
    clocks = SimpleNamespace(perf_counter=lambda: wall[0], process_time=lambda: ours[0])
    monkeypatch.setattr(of_training, "time", clocks)
    assert measured_flops(torch.device("cpu"), torch.float32) == pytest.approx(100e9)


def test_the_peak_of_several_threads_is_that_of_the_clock_for_they_wait_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    wall, ours = [0.0], [0.0]

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        seconds = 2 * len(left) ** 3 / 200e9
        wall[0] += seconds
        ours[0] += 1.2 * seconds  # of the second thread there was a fifth to do

    monkeypatch.setattr(torch, "mm", mm)
    clocks = SimpleNamespace(perf_counter=lambda: wall[0], process_time=lambda: ours[0])
    monkeypatch.setattr(of_training, "time", clocks)
    assert measured_flops(torch.device("cpu"), torch.float32) == pytest.approx(200e9)


def test_the_peak_of_a_slow_type_does_not_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    now, first = [0.0], [True]

    def mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        now[0] += 2 * len(left) ** 3 / 1.3e9 + (0.1 if first[0] else 0.0)
        first[0] = False

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(of_training, "time", SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0]))
    assert measured_flops(torch.device("cpu"), torch.bfloat16) == pytest.approx(1.3e9)
    assert now[0] < 1


def test_ranks_that_share_cores_have_no_more_than_the_cores_have() -> None:
    assert share_of_cores(threads=1, ranks=2, cores=2) == share_of_cores(threads=2, ranks=1, cores=4) == 1
    assert share_of_cores(threads=2, ranks=2, cores=2) == share_of_cores(threads=1, ranks=4, cores=2) == 0.5
    assert share_of_cores(threads=8, ranks=1, cores=2) == 0.25, "more threads than cores are no faster"


def test_a_share_of_more_than_all_is_unknown() -> None:
    assert mfu(1.0, 1.0) == 1.0 and mfu(1.001, 1.0) is None
