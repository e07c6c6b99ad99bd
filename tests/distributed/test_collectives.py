"""The collectives against what one process computes."""

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
