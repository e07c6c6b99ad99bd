"""The collectives through shared memory against gloo's, and what happens to those who wait for a rank that never comes."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax import collectives, meeting, shared_memory
from parallax.mesh import Group, Layout, Mesh
from tests.distributed.harness import run_layout, run_ranks

pytestmark = pytest.mark.skipif(meeting.why_not() is not None, reason=f"no shared memory: {meeting.why_not()}")
SLOT = shared_memory.SLOT_BYTES
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
ELEMENTS = (0, 1, 7, 1000, 40_001, SLOT // 4 - 1, SLOT // 4, SLOT // 4 + 1, 5 * SLOT // 8 + 3)


def _both(mesh: Mesh) -> tuple[Group, Group]:
    """Return the world through shared memory and through gloo."""
    shared = mesh.world
    gloo = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False).world
    assert shared is not None and gloo is not None
    assert shared.shared_memory is not None, shared.why_not_shared
    assert gloo.shared_memory is None
    return shared, gloo


def _values(elements: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Whole numbers, small enough that no dtype rounds their sum."""
    generator = torch.Generator().manual_seed(31 * rank + elements)
    return torch.randint(-16, 16, (elements,), generator=generator).to(dtype)


def _results(group: Group, dtype: torch.dtype, elements: int) -> dict[str, torch.Tensor]:
    """Return what each collective makes of the same values."""
    mine = _values(elements, dtype, group.rank)
    results = {op: collectives.all_reduce_(mine.clone(), group, op) for op in ("sum", "max", "min")}
    results["gather"] = collectives.all_gather(mine, group)
    whole = _values(elements * group.size, dtype, group.rank)
    results["scatter"] = collectives.reduce_scatter(whole, group)
    results["inner scatter"] = collectives.reduce_scatter(whole.view(-1, group.size).t().contiguous().t(), group, 1)
    for name, start in (("gather into", collectives.all_gather_into_start), ("scatter into", _scatter_into)):
        results[name] = whole.clone()
        start(results[name], group).wait()
    results["scatter into"] = results["scatter into"].view(group.size, -1)[group.rank] if elements else mine
    results["broadcast"] = collectives.broadcast_(mine.clone(), group, group.size - 1)
    collectives.barrier(group)
    return results


def _scatter_into(whole: torch.Tensor, group: Group) -> collectives.Pending:
    return collectives.reduce_scatter_into_start(whole, group)


def _compare(mesh: Mesh, sizes: tuple[int, ...]) -> list[str]:
    shared, gloo = _both(mesh)
    wrong = []
    for dtype in DTYPES:
        for elements in sizes:
            want = _results(gloo, dtype, elements) if elements else None
            for name, got in _results(shared, dtype, elements).items():
                if want is not None and not torch.equal(got, want[name]):
                    wrong.append(f"{name} of {elements} {dtype}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_what_gloo_gives_for_every_dtype_and_size(ranks: int) -> None:
    assert run_ranks(ranks, _compare, ELEMENTS) == [[]] * ranks


def test_eight_ranks_get_what_gloo_gives() -> None:
    assert run_ranks(8, _compare, (5, 20_001, SLOT // 8 + 1)) == [[]] * 8


def _rounded(mesh: Mesh) -> list[tuple[torch.Tensor, torch.Tensor]]:
    group = mesh.world
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for elements in (100, 300_000):
            generator = torch.Generator().manual_seed(elements)
            everyone = torch.randn(mesh.layout.world_size, elements, generator=generator).to(dtype)
            got = collectives.all_reduce_(everyone[mesh.rank].clone(), group)
            part = collectives.reduce_scatter(everyone[mesh.rank], group) if elements % 4 == 0 else got
            assert torch.equal(part, got.chunk(4)[mesh.rank]), "reduce_scatter sums in another order than all_reduce"
            results.append((got, everyone))
    return results


def test_sums_run_in_rank_order_and_are_bitwise_the_same_on_all_ranks() -> None:
    results = run_ranks(4, _rounded)
    for case, (got, everyone) in enumerate(results[0]):
        total = everyone[0].float()
        for row in everyone[1:]:
            total = total + row  # bf16 is summed in fp32 and rounded once
        assert torch.equal(got, total.to(got.dtype))
        assert all(torch.equal(got, other[case][0]) for other in results[1:])


def _strided_and_on_leaves(mesh: Mesh) -> list[Any]:
    strided = torch.arange(6.0).view(2, 3).t()
    leaf = torch.ones(3, requires_grad=True)
    collectives.all_reduce_(strided, mesh.world)
    collectives.all_reduce_(leaf, mesh.world)
    column = torch.full((2, 2), float(mesh.rank)).t()[:, 0]
    collectives.broadcast_(column, mesh.world, 1)
    return [strided.tolist(), leaf.tolist(), column.tolist()]


def test_strided_tensors_and_parameters_are_reduced_in_place() -> None:
    expected = [(2 * torch.arange(6.0).view(2, 3).t()).tolist(), [2.0] * 3, [1.0] * 2]
    assert run_ranks(2, _strided_and_on_leaves) == [expected] * 2


def _many_small_calls(mesh: Mesh, calls: int) -> int:
    wrong = 0
    for call in range(calls):
        total = collectives.all_reduce_(torch.tensor([call + mesh.rank]), mesh.world).item()
        wrong += total != mesh.layout.world_size * call + sum(range(mesh.layout.world_size))
    return wrong


def test_ten_thousand_calls_in_a_row_stay_correct() -> None:
    assert run_ranks(2, _many_small_calls, 10_000) == [0, 0]
    assert run_ranks(4, _many_small_calls, 2_000) == [0] * 4


def _several_groups(mesh: Mesh) -> list[float]:
    results = []
    for step in range(50):
        for group in (mesh.tp, mesh.dp, mesh.pp, mesh.world, mesh.tp):
            assert group is not None and group.shared_memory is not None
            results.append(collectives.all_reduce_(torch.tensor([float(mesh.rank + step)]), group).item())
    return results


def test_several_groups_in_one_process_do_not_mix() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    for rank, results in enumerate(run_layout(layout, _several_groups)):
        sums = [sum(layout.ranks_along(axes, rank)) for axes in (["tp"], ["dp"], ["pp"], ["tp", "dp", "pp"], ["tp"])]
        sizes = [2, 2, 2, 8, 2]
        assert results == [
            float(total + size * step) for step in range(50) for total, size in zip(sums, sizes, strict=True)
        ]


def _until_error(mesh: Mesh, action: Callable[[Mesh], None]) -> tuple[str, float]:
    """Return the error that `action` raises, and how many seconds that took."""
    collectives.barrier(mesh.world)
    start = time.monotonic()
    try:
        action(mesh)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def _rank_2_is_killed(mesh: Mesh) -> None:
    collectives.all_reduce_(torch.ones(3), mesh.world)
    if mesh.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.all_reduce_(torch.ones(5), mesh.world)


def _survivors(mesh: Mesh, folder: str) -> None:
    text, seconds = _until_error(mesh, _rank_2_is_killed)
    try:
        collectives.barrier(mesh.world)
        again = ""
    except RuntimeError as error:
        again = str(error)
    Path(folder, str(mesh.rank)).write_text(f"{seconds}\n{text}\n{again}")
    os._exit(1)  # what was to be said is written; the harness would wait for a barrier that cannot be


def test_who_waits_for_a_killed_rank_is_told_soon_and_the_group_stays_broken(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(4, _survivors, str(tmp_path))
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in (0, 1, 3):
        seconds, text, again = (tmp_path / str(rank)).read_text().split("\n")
        assert float(seconds) < 5
        assert text == (
            f"global rank {rank}, group world of [0, 1, 2, 3]: global rank 2 ended while the others "
            "waited in all_reduce sum of 5 float32"
        )
        assert again.startswith("an earlier call failed and left the ranks out of step") and text in again


def _rank_1_stays_away(mesh: Mesh) -> tuple[str, float]:
    group = shared_memory_of(mesh, timeout_seconds=1.0)
    start = time.monotonic()
    try:
        if mesh.rank != 1:
            group.all_gather(torch.ones(4), torch.empty(mesh.layout.world_size * 4))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    time.sleep(2.0)
    return "", 0.0


def shared_memory_of(mesh: Mesh, timeout_seconds: float) -> shared_memory.SharedMemory:
    """Return a second segment of the world, with a time limit of its own."""
    mesh = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, timeout_seconds=timeout_seconds)
    assert mesh.world is not None and mesh.world.shared_memory is not None
    return mesh.world.shared_memory


def test_who_waits_too_long_is_told_who_is_missing() -> None:
    results = run_ranks(3, _rank_1_stays_away)
    for rank in (0, 2):
        text, seconds = results[rank]
        assert 0.9 < seconds < 10
        assert "global rank 1 did not come to all_gather of 4 float32 in 1 s" in text


def _different_calls(mesh: Mesh, calls: list[tuple[str, int, torch.dtype]]) -> str:
    name, elements, dtype = calls[mesh.rank]
    actions = {
        "max": lambda t: collectives.all_reduce_(t, mesh.world, "max"),
        "sum": _sum(mesh),
        "gather": _gather(mesh),
    }
    return _until_error(mesh, lambda mesh: actions[name](torch.ones(elements, dtype=dtype)))[0]


def _sum(mesh: Mesh) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: collectives.all_reduce_(tensor, mesh.world)


def _gather(mesh: Mesh) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: collectives.all_gather(tensor, mesh.world)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("sum", 9, torch.float32), "all_reduce sum of 9 float32"),
        (("sum", 8, torch.float64), "all_reduce sum of 8 float64"),
        (("max", 8, torch.float32), "all_reduce max of 8 float32"),
        (("gather", 8, torch.float32), "all_gather of 8 float32"),
        (("sum", SLOT, torch.float32), f"all_reduce sum of {SLOT} float32"),
    ],
)
def test_ranks_in_different_calls_are_told_both(other: tuple[str, int, torch.dtype], told: str) -> None:
    most = ("sum", 8, torch.float32)
    for text in run_ranks(3, _different_calls, [most, other, most]):
        assert "the ranks are in different calls: global rank 0, global rank 2 in all_reduce sum of 8 float32" in text
        assert text.endswith(f"; global rank 1 in {told}")


def _bool(mesh: Mesh) -> str:
    try:
        collectives.all_reduce_(torch.ones(2, dtype=torch.bool), mesh.world)
    except TypeError as error:
        return str(error)
    return ""


def test_booleans_are_refused_and_not_summed_to_something_else() -> None:
    assert all("bool" in text for text in run_ranks(2, _bool))


def _mapped(mesh: Mesh) -> list[str]:
    collectives.all_reduce_(torch.ones(2 * SLOT // 4), mesh.world)
    collectives.barrier(mesh.world)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [re.sub(r".* /", "/", line) for line in maps if "parallax" in line]


def test_the_segment_is_no_file_that_could_be_left_behind() -> None:
    assert run_ranks(2, _mapped) == [["/memfd:parallax-world (deleted)"]] * 2
    assert not [name for name in os.listdir("/dev/shm") if "parallax" in name]


def test_ranks_on_different_hosts_keep_to_gloo() -> None:
    here = {"obstacle": None, "home": ["a", "b", "c"]}
    assert shared_memory._find_obstacle([here, here]) is None
    there = {"obstacle": None, "home": ["other", "b", "c"]}
    assert "different hosts" in str(shared_memory._find_obstacle([here, there]))
    mac = {"obstacle": "it needs Linux on x86-64, and this is darwin on arm64"}
    assert "rank 1: it needs Linux" in str(shared_memory._find_obstacle([here, mac]))


def _refused(mesh: Mesh) -> tuple[bool, str | None]:
    """Join again as a world in which rank 1 cannot open rank 0's memory."""
    group = mesh.world
    assert group is not None
    if mesh.rank == 1:
        shared_memory._map = lambda first, ranks: (None, "rank 1 may not")  # type: ignore[assignment]
    joined, why_not = shared_memory.join(
        "test", group.ranks, group.rank, lambda value: collectives.gather_json(value, group), 5.0
    )
    return joined is None, why_not


def test_all_ranks_keep_to_gloo_when_one_cannot_open_the_memory() -> None:
    assert run_ranks(2, _refused) == [(True, "rank 1 may not")] * 2


def _limited(mesh: Mesh) -> tuple[bool, str | None]:
    """Join again as a world in which rank 0 may make no large files, as `ulimit -f` has it."""
    group = mesh.world
    assert group is not None
    if mesh.rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    joined, why_not = shared_memory.join(
        "test", group.ranks, group.rank, lambda value: collectives.gather_json(value, group), 5.0
    )
    return joined is None, why_not


def test_all_ranks_keep_to_gloo_when_one_cannot_make_the_memory() -> None:
    assert run_ranks(2, _limited) == [(True, "rank 0: no memory to share can be made (File too large)")] * 2
