"""Every layout writes the same files, and every layout loads them: together, any layout resumes any layout.

The table: each row loads what one process saved, is compared value by value with what the run had, and saves it again, under
every ZeRO stage. All rows' files being the same bytes, each of them is what any other row would have loaded.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parallax.checkpoint import blocks, fill, plan, reader
from parallax.checkpoint.load import load
from parallax.checkpoint.save import save
from parallax.data_parallel.options import ZERO_STAGES
from parallax.mesh import Layout, Mesh
from tests.checkpoint.runs import GPT2, LLAMA, TIED, build_parts, contents, differences, single_process_mesh
from tests.distributed.harness import run_layout

MODELS = {
    "llama": (LLAMA, torch.float32),
    "qwen3, tied": (TIED, torch.float32),
    "gpt2, bf16 with main parameters": (GPT2, torch.bfloat16),
}
# Layout and schedule. The vocabulary of 131 divides by no tp; there are fewer KV heads than 4 ranks.
ROWS = [
    (Layout(), "1f1b"),
    (Layout(dp=3), "1f1b"),
    (Layout(tp=2), "1f1b"),
    (Layout(tp=4), "1f1b"),
    (Layout(tp=2, dp=2), "1f1b"),
    (Layout(pp=2), "dualpipe"),  # each stage on both ranks, which shard its states
    (Layout(pp=2), "zb-v"),  # first and last stage on one rank: a tied embedding once
]
MORE_ROWS = [
    (Layout(dp=2), "1f1b"),
    (Layout(pp=2), "1f1b"),
    (Layout(pp=3), "1f1b"),
    (Layout(pp=2, dp=2), "1f1b"),
    (Layout(tp=2, pp=2), "1f1b"),
    (Layout(pp=4), "1f1b"),  # one stage without a layer
    (Layout(tp=2, pp=2, dp=2), "1f1b"),
    (Layout(pp=2), "interleaved"),
    (Layout(pp=2, dp=2), "dualpipe"),
    (Layout(tp=2, pp=2), "dualpipev"),
    (Layout(pp=4), "dualpipe"),
]

BLOCK_BYTES = 1700


def _use_small_units() -> None:
    """Make this process cut its few kilobytes as it would gigabytes: into several files, units and rounds."""
    plan.MIN_FILE_BYTES, plan.UNIT_BYTES, plan.ROUND_BYTES, fill.READ_BYTES = 20_000, 3000, 40_000, 3000
    reader.READ_BYTES, blocks.BLOCK_BYTES = 3000, BLOCK_BYTES


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A checkpoint of each model, written by one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MIN_FILE_BYTES", 20_000)
        patch.setattr(blocks, "BLOCK_BYTES", BLOCK_BYTES)
        yield _save_models(tmp_path_factory.mktemp("single"))


def _save_models(root: Path) -> dict[str, Path]:
    mesh = single_process_mesh()
    return {
        name: save(root / name, 100, build_parts(mesh, config, zero=0, seed=1, dtype=dtype, fill=True), mesh)
        for name, (config, dtype) in MODELS.items()
    }


def _load_and_save(mesh: Mesh, saved: dict[str, Path], root: Path, schedule: str) -> list:
    """Load each model under each ZeRO stage, and save each again; return the tensors that are wrong."""
    found: list = []
    _use_small_units()
    for name, (config, dtype) in MODELS.items():
        for zero in ZERO_STAGES:
            parts = build_parts(mesh, config, zero, seed=2, dtype=dtype, schedule=schedule)
            state = load(saved[name], parts, mesh)
            found += differences(parts, seed=1)
            parts.state = state["training"]
            save(root / f"{name} zero {zero}", 100, parts, mesh)
    return found


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE_ROWS)],
    ids=lambda value: f"tp{value.tp}-pp{value.pp}-dp{value.dp}" if isinstance(value, Layout) else value,
)
def test_what_one_process_saves_any_layout_loads_and_saves_as_the_same_bytes(
    layout: Layout, schedule: str, single: dict[str, Path], tmp_path: Path
) -> None:
    assert run_layout(layout, _load_and_save, single, tmp_path, schedule) == [[]] * layout.world_size
    for name in MODELS:
        for zero in ZERO_STAGES:
            assert contents(tmp_path / f"{name} zero {zero}" / "step-00000100") == contents(single[name]), (name, zero)
