"""The model that docs/models.md makes of parallax.layers is the same one over two ranks."""

import re
from pathlib import Path

import parallax.layers
from parallax.mesh import Layout, Mesh
from tests.distributed.harness import run_layout

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def first_loss(mesh: Mesh) -> float:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {"__name__": "page"}
    exec(program, names)
    loss: float = names["first_loss"](mesh.tp)
    return loss


def test_the_pages_model_has_the_same_loss_over_two_ranks() -> None:
    (alone,) = run_layout(Layout(), first_loss)
    assert 4.5 < alone < 4.8  # about log 100
    for loss in run_layout(Layout(tp=2), first_loss):
        assert abs(loss - alone) < 1e-5


def test_everything_on_the_shelf_is_there_and_listed_in_order() -> None:
    assert all(hasattr(parallax.layers, name) for name in parallax.layers.__all__)
    public = {name for name, value in vars(parallax.layers).items() if not name.startswith("_")}
    assert public == set(parallax.layers.__all__)
