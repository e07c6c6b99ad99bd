"""A model and a loop of the user's own under every schedule: the same weights as training it in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.pipeline import ALL_SCHEDULES, DualPipe, Pipeline, forward_only, make_schedule
from parallax.tensor_parallel.linear import ColumnParallelLinear
from tests.distributed.harness import run_layout

WIDTH, ROWS, STEPS = 8, 16, 3


def make_stages(count: int) -> list[nn.Module]:
    """Return a model cut into stages, plain layers and ours mixed."""
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH) if index % 2 else ColumnParallelLinear(WIDTH, WIDTH, std=0.5), nn.Tanh())
        for index in range(count)
    ]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator))
        for _ in range(STEPS)
    ]


def train(pipe: Any, mesh: Mesh) -> tuple[list[float], dict[str, list[float]]]:
    """Return this rank's losses and its weights at the end; two steps are accumulated into one update."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    losses = []
    for number, (inputs, labels) in enumerate(batches()):
        rows = slice(mesh.dp_rank, None, mesh.layout.dp)
        loss = pipe.step(inputs[rows], labels[rows], nn.functional.mse_loss)
        losses += [] if loss is None else [loss.item()]
        if number != 1:
            optimizer.step()
            optimizer.zero_grad()
    weights = {
        f"{index}.{name}": parameter.flatten().tolist()
        for index, stage in pipe.stages.items()
        for name, parameter in stage.named_parameters()
    }
    return losses, weights


def pipelined(mesh: Mesh, name: str) -> Any:
    if name == "dualpipe":
        return train(DualPipe(make_stages(mesh.layout.pp), mesh, 8), mesh)
    chunks = {"interleaved": 2, "interleaved-paired": 2, "zb-v": 2, "dualpipev": 2}.get(name, 1)
    return train(Pipeline(make_stages(chunks * mesh.layout.pp), mesh, name, 8), mesh)


def plainly(num_stages: int) -> tuple[list[float], dict[str, list[float]]]:
    stages = make_stages(num_stages)
    model = nn.Sequential(*stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number, (inputs, labels) in enumerate(batches()):
        loss = nn.functional.mse_loss(model(inputs), labels)
        losses.append(loss.item())
        loss.backward()
        if number != 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}


def all_of(mesh: Mesh) -> dict[str, Any]:
    return {name: pipelined(mesh, name) for name in ALL_SCHEDULES}


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(pp=2, dp=2)], ids=str)
def test_a_users_own_model_trains_as_in_one_process(layout: Layout) -> None:
    results = run_layout(layout, all_of)
    for name in ALL_SCHEDULES:
        num_stages = max(int(key.split(".")[0]) for result in results for key in result[name][1]) + 1
        losses, weights = plainly(num_stages)
        seen = [result[name][0] for result in results if result[name][0]]
        means = [sum(column) / len(column) for column in zip(*seen, strict=True)]
        assert means == pytest.approx(losses, rel=1e-5)
        for result in results:
            for key, values in result[name][1].items():
                assert values == pytest.approx(weights[key], rel=1e-4, abs=1e-5), (name, key)


class Head(nn.Module):
    """The last stage, with the first one's weight, as a tied embedding is used."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.scale = weight, nn.Parameter(torch.full((1,), 0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.scale * hidden @ self.weight.t()


def sharing_stages(count: int) -> list[nn.Module]:
    """Return stages of which the second and the last but one are the same module, and first and last share a weight."""
    stages = make_stages(count)
    if count > 1:
        stages[-2], stages[-1] = stages[1 if count > 2 else 0], Head(stages[0][0].weight)
    return [stage.double() for stage in stages]


def gradients_of(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor | None]:
    return {
        f"{index}.{key}": parameter.grad
        for index, stage in stages.items()
        for key, parameter in stage.named_parameters()
    }


def gradients_of_sharing(mesh: Mesh) -> dict[str, tuple[int, dict[str, torch.Tensor | None]]]:
    """Return under each schedule the number of stages, and the gradients that this rank's have after two steps."""
    found = {}
    for name in ALL_SCHEDULES:
        if name == "dualpipe" and mesh.layout.pp == 1:
            continue
        count = make_schedule(name, mesh.layout.pp, 8).num_stages
        pipe = Pipeline(sharing_stages(count), mesh, name, 8)
        for inputs, labels in batches()[:2]:
            rows = slice(mesh.dp_rank, None, mesh.layout.dp)
            pipe.step(inputs[rows].double(), labels[rows].double(), nn.functional.mse_loss)
        found[name] = count, gradients_of(pipe.stages)
    return found


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=4), Layout(dp=2), Layout(pp=2, dp=2)], ids=str)
def test_what_stages_share_gets_the_gradients_of_all_of_them_once(layout: Layout) -> None:
    expected = {}
    for count in (1, 2, 4, 8):
        stages = sharing_stages(count)
        model = nn.Sequential(*stages)
        for inputs, labels in batches()[:2]:
            nn.functional.mse_loss(model(inputs.double()), labels.double()).backward()
        expected[count] = gradients_of(dict(enumerate(stages)))
    for result in run_layout(layout, gradients_of_sharing):
        for name, (count, gradients) in result.items():
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[count][key], rtol=1e-10, atol=1e-14, msg=f"{name} {key}")


class Masked(nn.Module):
    """A stage with a buffer, which every process makes differently."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.mask * self.weight


def made_differently(mesh: Mesh) -> dict[str, list[float]]:
    torch.manual_seed(mesh.rank)
    pipe = DualPipe([Masked() for _ in range(mesh.layout.pp)], mesh, 8)
    return {
        f"{index}.{key}": value.tolist()
        for index, stage in pipe.stages.items()
        for key, value in stage.state_dict().items()
    }


def test_all_holders_start_with_the_parameters_and_buffers_of_the_first() -> None:
    first, *others = run_layout(Layout(pp=2, dp=2), made_differently)
    assert len(first) == 4 and all(other == first for other in others)


def evaluated(mesh: Mesh) -> list[tuple[list[float], int]]:
    """Return under each schedule this rank's losses without gradients, and how many gradients there are afterwards."""
    found = []
    inputs, labels = batches()[0]
    for name in ALL_SCHEDULES:
        pipe = Pipeline(make_stages(make_schedule(name, mesh.layout.pp, 8).num_stages), mesh, name, 8)
        with torch.no_grad():
            losses = [pipe.step(inputs, labels, nn.functional.mse_loss) for _ in range(2)]
        found.append(
            ([loss.item() for loss in losses if loss is not None], sum(p.grad is not None for p in pipe.parameters()))
        )
    return found


def test_without_gradients_a_step_only_evaluates() -> None:
    first, second = run_layout(Layout(pp=2), evaluated)
    inputs, labels = batches()[0]
    for here, there, name in zip(first, second, ALL_SCHEDULES, strict=True):
        model = nn.Sequential(*make_stages(make_schedule(name, 2, 8).num_stages))
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(inputs), labels).item()
        for losses in zip(*(losses for losses, _ in (here, there) if losses), strict=True):
            assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-5), name
        assert here[1] == there[1] == 0 and here[0] + there[0], name


def refusals(mesh: Mesh) -> list[str]:
    found = []
    for attempt in (
        lambda: DualPipe(make_stages(3), mesh, 8),
        lambda: Pipeline({5: nn.Linear(2, 2)}, mesh, "1f1b", 8),
        lambda: Pipeline(make_stages(1), mesh, make_schedule("1f1b", 1, 4), 8),
        lambda: Pipeline(make_stages(1), mesh, forward_only(1, 8), 8),
        lambda: Pipeline(make_stages(1), mesh, "1f1b", 8).step(torch.ones(9, WIDTH), None, nn.functional.mse_loss),
        lambda: Pipeline(make_stages(1), mesh, "1f1b", 8).step(None, None, nn.functional.mse_loss),
        lambda: Pipeline(make_stages(1), mesh, "1f1b", 8).step([1, 2], None, nn.functional.mse_loss),  # type: ignore[arg-type]
        lambda: Pipeline(make_stages(1), mesh, "1f1b", 2.5),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_what_does_not_fit_is_one_sentence() -> None:
    ((odd, missing, other, forwards, uneven, nothing, no_tensor, half),) = run_layout(Layout(), refusals)
    assert other == "schedule 1f1b is for 4 micro-batches; a table with backwards for 8 is needed"
    assert forwards.endswith("is for 8 micro-batches without backwards; a table with backwards for 8 is needed")
    assert odd == "schedule dualpipe needs an even number of ranks (--pp), not 1; use 2, or dualpipev"
    assert missing.endswith("but stage 0 is not given")
    assert uneven == "inputs of 9 rows cannot be cut into 8 equal micro-batches"
    assert nothing == "pipeline rank 0 holds stage 0, so step() needs inputs there"
    assert no_tensor == "step() takes inputs as a tensor [batch, ...], not [1, 2]"
    assert half == "schedule 1f1b takes a whole number of micro-batches, not 2.5"


def made_of_other_tables(mesh: Mesh) -> list[str]:
    told = []
    for schedule, micro_batches in ((("gpipe", "1f1b")[mesh.rank], 4), ("1f1b", 2 + 2 * mesh.rank)):
        with pytest.raises(ConfigError) as caught:
            Pipeline(make_stages(2), mesh, schedule, num_micro_batches=micro_batches)
        told += caught.value.problems
    return told


def test_ranks_with_different_tables_are_told_so() -> None:
    first, second = run_layout(Layout(pp=2), made_of_other_tables)
    expected = [
        f"rank 0 makes a pipeline of schedule {name} with {count} micro-batches, and rank 1 one of 1f1b with 4; "
        "give all ranks the same"
        for name, count in (("gpipe", 4), ("1f1b", 2))
    ]
    assert first == second == expected
