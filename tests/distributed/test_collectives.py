"""The collectives against what one process computes."""

import os
import socket
import struct

import pytest
import torch

from parallax import collectives
from parallax.mesh import Layout, Mesh, Replicas
from tests.distributed.harness import run_layout, run_ranks


def _strided_sum(mesh: Mesh) -> list:
    tensor = torch.arange(6.0).view(2, 3).t()
    collectives.all_reduce_(tensor, mesh.dp)
    return tensor.tolist()


def test_a_strided_tensor_is_summed_and_not_dropped() -> None:
    expected = (2 * torch.arange(6.0).view(2, 3).t()).tolist()
    assert run_ranks(2, _strided_sum) == [expected, expected]


def _pairs(mesh: Mesh) -> dict:
    tp = mesh.tp
    assert tp is not None
    x = torch.arange(24.0).view(1, 4, 6) * (tp.rank + 1)
    results = {}
    for name in ("copy_to", "reduce_from", "gather_sequence", "scatter_sequence"):
        leaf = x.clone().requires_grad_()
        out = getattr(collectives, name)(leaf, tp)
        weight = torch.arange(float(out.numel())).view(out.shape) + tp.rank
        (out * weight).sum().backward()
        results[name] = (out.detach(), leaf.grad)
    return results


def test_each_autograd_collective_pairs_with_its_conjugate() -> None:
    first, second = run_layout(Layout(tp=2), _pairs)
    base = torch.arange(24.0).view(1, 4, 6)
    both = base + 2 * base
    weight = torch.arange(24.0).view(1, 4, 6)
    for rank, got in enumerate((first, second)):
        mine = base * (rank + 1)
        assert torch.equal(got["copy_to"][0], mine)
        assert torch.equal(got["copy_to"][1], 2 * weight + 1)
        assert torch.equal(got["reduce_from"][0], both)
        assert torch.equal(got["reduce_from"][1], weight + rank)
        assert torch.equal(got["gather_sequence"][0], torch.cat([base, 2 * base], 1))
        wide = 2 * torch.arange(48.0).view(1, 8, 6) + 1
        assert torch.equal(got["gather_sequence"][1], wide[:, 4 * rank : 4 * rank + 4])
        assert torch.equal(got["scatter_sequence"][0], both[:, 2 * rank : 2 * rank + 2])
        half = torch.arange(12.0).view(1, 2, 6)
        assert torch.equal(got["scatter_sequence"][1], torch.cat([half, half + 1], 1))


def _json(mesh: Mesh) -> list:
    return collectives.gather_json({"rank": mesh.rank, "text": "ü" * mesh.rank}, mesh.world)


def test_json_values_of_different_length_are_gathered_in_rank_order() -> None:
    expected = [{"rank": rank, "text": "ü" * rank} for rank in range(3)]
    assert run_ranks(3, _json) == [expected] * 3


def _holders(mesh: Mesh) -> dict:
    kinds = [Replicas(), Replicas(tp=2), Replicas(stages=(0, 1))]
    groups = mesh.holders(kinds)
    return {kind: _sum_of_ranks(group, mesh) for kind, group in groups.items()}


def _sum_of_ranks(group, mesh: Mesh) -> float:
    return collectives.all_reduce_(torch.tensor([float(mesh.rank)]), group).item()


def test_every_kind_of_holders_sums_over_exactly_its_ranks() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    for rank, sums in enumerate(run_layout(layout, _holders)):
        for kind, total in sums.items():
            assert total == sum(kind.ranks(layout, rank)), (rank, kind)


def _received() -> int:
    """Return how many bytes have come in over this process's TCP connections: tcpi_bytes_received of TCP_INFO (man 7 tcp)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                total += struct.unpack_from("=Q", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 128)[
                    0
                ]
        except (OSError, struct.error):  # a file, or a socket of another kind
            pass
    return total


def _bytes_over_gloo(mesh: Mesh) -> dict[str, float]:
    """Bytes received in each collective of 4 MiB, as a share of these."""
    mesh = Mesh(mesh.layout, mesh.rank, mesh.device, connected=True, shared_memory=False)
    assert mesh.world is not None
    group, whole = mesh.world, torch.ones(2**20)
    rows = whole.view(group.size, -1)
    shares = {}
    for name, call in {
        "all_reduce": lambda: collectives.all_reduce_(whole, group),
        "reduce_scatter": lambda: collectives.reduce_scatter(rows, group),
        "reduce_scatter in place": lambda: collectives.reduce_scatter_into_start(whole, group).wait(),
        "all_gather": lambda: collectives.all_gather(rows[group.rank], group),
        "all_gather in place": lambda: collectives.all_gather_into_start(whole, group).wait(),
    }.items():
        collectives.barrier(group)
        before = _received()
        call()
        collectives.barrier(group)
        shares[name] = (_received() - before) / 2**22
    return shares


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="counts bytes as Linux tells them")
def test_over_gloo_no_more_is_sent_than_the_formulas_say() -> None:
    for ranks in (2, 4):
        part = (ranks - 1) / ranks
        for shares in run_ranks(ranks, _bytes_over_gloo):
            for name, share in shares.items():
                assert share == pytest.approx(2 * part if name == "all_reduce" else part, rel=0.01), (ranks, name)
