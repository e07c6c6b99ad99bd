"""Every layout writes the same files, and every layout loads them: together, any layout resumes any layout."""

from pathlib import Path

import pytest

from parallax.checkpoint.load import load
from parallax.checkpoint.save import save
from parallax.mesh import Layout, Mesh
from tests.checkpoint.runs import GPT2, LLAMA, TIED, build_parts, contents, differences, single_process_mesh
from tests.distributed.harness import run_layout

MODELS = {"llama": LLAMA, "tied": TIED, "gpt2": GPT2}
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(tp=2, dp=2),
    Layout(pp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
    Layout(pp=3),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model, written by one process."""
    mesh = single_process_mesh()
    root = tmp_path_factory.mktemp("single")
    return {
        name: save(root / name, 100, build_parts(mesh, config, zero=0, seed=1, fill=True), mesh)
        for name, config in MODELS.items()
    }


def _load_and_save(mesh: Mesh, saved: dict[str, Path], root: Path) -> list:
    """Load each model under ZeRO 0 and 1, and save each again; return the tensors that are wrong."""
    found: list = []
    for name, config in MODELS.items():
        for zero in (0, 1):
            parts = build_parts(mesh, config, zero, seed=2)
            state = load(saved[name], parts, mesh)
            found += differences(parts, seed=1)
            parts.state = state["training"]
            save(root / f"{name} zero {zero}", 100, parts, mesh)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}")
def test_what_one_process_saves_any_layout_loads_and_saves_as_the_same_bytes(
    layout: Layout, single: dict[str, Path], tmp_path: Path
) -> None:
    assert run_layout(layout, _load_and_save, single, tmp_path) == [[]] * layout.world_size
    for name in MODELS:
        for zero in (0, 1):
            assert contents(tmp_path / f"{name} zero {zero}" / "step-00000100") == contents(single[name]), (name, zero)
