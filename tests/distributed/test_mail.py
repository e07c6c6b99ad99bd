"""Messages between two ranks in shared memory: all arrive, in any order, without growth, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from parallax import meeting
from parallax.collectives import barrier
from parallax.errors import LostRank
from parallax.mail import Mail
from parallax.mesh import Layout, Mesh
from tests.distributed.harness import run_layout

pytestmark = pytest.mark.skipif(meeting.why_not() is not None, reason=f"no shared memory: {meeting.why_not()}")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
SHAPES = ((), (0,), (1,), (3, 5), (2, 0, 4), (7, 300, 11), (1, 1, 1, 1, 1, 1, 1, 2))


def _mail(mesh: Mesh) -> Mail:
    shared = mesh.world.shared_memory
    assert shared is not None and shared.mail is not None, mesh.world.why_not_shared
    return shared.mail


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _all_kinds(mesh: Mesh) -> int:
    mail, kinds = _mail(mesh), [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for number, kind in enumerate(kinds):
        mail.send(1 - mesh.rank, number + 1, _numbers(*kind, seed=number))
    for number, kind in reversed(list(enumerate(kinds))):
        received = mail.receive(1 - mesh.rank, number + 1)
        assert received.dtype == kind[1]
        assert torch.equal(received, _numbers(*kind, seed=number))
    return len(kinds)


def test_tensors_of_any_shape_and_type_arrive_in_any_order() -> None:
    assert run_layout(Layout(dp=2), _all_kinds) == [49, 49]


def _many(mesh: Mesh) -> None:
    """The receiver begins only when all have been sent: a send does not wait for it."""
    mail, count = _mail(mesh), 100
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    if mesh.rank == 0:
        for number in range(count):
            mail.send(1, number + 1, torch.full((1000,), number))
    barrier(mesh.world)
    if mesh.rank == 1:
        for number in order:
            assert torch.equal(mail.receive(0, number + 1), torch.full((1000,), number))


def _few_descriptors(mesh: Mesh) -> int:
    mail, before = _mail(mesh), len(os.listdir("/proc/self/fd"))
    if mesh.rank == 0:
        for number in range(3000):
            mail.send(1, number + 1, torch.full((3,), number))
    barrier(mesh.world)
    if mesh.rank == 1:
        assert sum(mail.receive(0, number + 1)[0].item() for number in range(3000)) == 2999 * 1500
    barrier(mesh.world)
    for length in range(1, 400, 7):  # other shapes find room in the same stores
        mail.send(1 - mesh.rank, 5000 + length, torch.zeros(length))
        assert mail.receive(1 - mesh.rank, 5000 + length).shape == (length,)
    return len(os.listdir("/proc/self/fd")) - before


def test_descriptors_do_not_grow_with_messages_and_shapes() -> None:
    assert max(run_layout(Layout(dp=2), _few_descriptors)) < 40


def test_any_number_of_messages_can_be_under_way() -> None:
    run_layout(Layout(dp=2), _many)


def _mapped_bytes() -> int:
    """Return how much memory this process shares with others."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * os.sysconf("SC_PAGE_SIZE")


def _to_and_fro(mesh: Mesh) -> int:
    mail, tensor = _mail(mesh), torch.arange(1 << 18, dtype=torch.float32).view(512, 512).t()  # 1 MiB, not contiguous
    before = 0
    for number in range(200):
        if mesh.rank == 0:
            mail.send(1, number + 1, tensor)
            assert torch.equal(mail.receive(1, number + 1), tensor + number)
        else:
            mail.send(0, number + 1, mail.receive(0, number + 1) + number)
        if number == 20:
            before = _mapped_bytes()
    return _mapped_bytes() - before


def test_memory_does_not_grow_with_the_messages_that_have_arrived() -> None:
    assert max(run_layout(Layout(dp=2), _to_and_fro)) < 1 << 20


def _late(mesh: Mesh) -> None:
    """The sleeping receiver is woken; a message of another tag does not wake it for good."""
    mail = _mail(mesh)
    if mesh.rank == 0:
        for tag in (7, 8):
            time.sleep(0.5)
            mail.send(1, tag, torch.tensor(tag))
        assert mail.receive(1, 9).item() == 9  # no end of the sender and no further message wakes the receiver
    else:
        assert mail.receive(0, 8).item() == 8
        assert mail.receive(0, 7).item() == 7
        mail.send(0, 9, torch.tensor(9))


def test_who_waits_is_woken_by_its_own_message() -> None:
    run_layout(Layout(dp=2), _late)


def _dies_after_sending(mesh: Mesh, folder: str) -> None:
    mail = _mail(mesh)
    if mesh.rank == 1:
        mail.send(0, 1, torch.ones(3))
        barrier(mesh.world)
        os.kill(os.getpid(), signal.SIGKILL)
    assert torch.equal(mail.receive(1, 1), torch.ones(3))
    barrier(mesh.world)
    started = time.monotonic()
    try:
        mail.receive(1, 2)
    except LostRank as error:
        Path(folder, "text").write_text(f"{time.monotonic() - started}\n{error}")
    os._exit(1)  # the harness would wait for a barrier that cannot be


def test_who_waits_for_a_dead_rank_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_layout(Layout(dp=2), _dies_after_sending, str(tmp_path))
    deadline = time.monotonic() + 10
    while not (tmp_path / "text").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    seconds, text = (tmp_path / "text").read_text().split("\n")
    assert float(seconds) < 5
    assert text == "global rank 1 ended while it was waited for"
