"""The parallel layers against plain modules: outputs and every gradient, in float64, for inputs of any stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallax.collectives import all_gather
from parallax.layers import (
    ColumnParallelLinear,
    DecoderConfig,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    TransformerLayer,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from parallax.mesh import Layout, Mesh, size_of
from parallax.tensor_parallel.facts import initialize, named_parameters_with_facts
from tests.distributed.harness import run_layout

CONFIG = DecoderConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    qk_norm=True,
    initializer_range=0.3,
)
GPT = DecoderConfig(
    family="gpt2",
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    bias=True,
    initializer_range=0.3,
)
KINDS: dict[str, Callable[..., nn.Module]] = {
    "column then row": lambda tp, sp: nn.Sequential(
        ColumnParallelLinear(16, 24, tp=tp, bias=True, sequence_parallel=sp, std=0.3),
        RowParallelLinear(24, 16, tp=tp, bias=True, sequence_parallel=sp, std=0.3),
    ),
    "mlp": lambda tp, sp: ParallelMLP(16, 24, tp=tp, sequence_parallel=sp, std=0.3),
    "attention": lambda tp, sp: ParallelAttention(
        16, 4, num_key_value_heads=2, tp=tp, sequence_parallel=sp, qkv_bias=True, std=0.3
    ),
    "recomputed attention": lambda tp, sp: ParallelAttention(
        16, 4, tp=tp, sequence_parallel=sp, recompute=True, std=0.3
    ),
    "layer": lambda tp, sp: TransformerLayer(CONFIG, tp=tp, sequence_parallel=sp),
    "recomputed layer": lambda tp, sp: TransformerLayer(CONFIG, tp=tp, sequence_parallel=sp, recompute="full"),
    "gpt layer": lambda tp, sp: TransformerLayer(GPT, tp=tp, sequence_parallel=sp),
}
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.cat([x, x], -1)[..., ::2],
}


def _input(stride: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return STRIDES[stride](torch.randn(2, 8, 16, generator=generator, dtype=torch.float64))


def _whole(name: str, local: torch.Tensor, facts, mesh: Mesh) -> torch.Tensor:
    """The full gradient from the ranks' parts, as data parallelism would make it."""
    rows = all_gather(local.contiguous().unsqueeze(0), mesh.tp)
    if facts.shard_dim is None:
        return rows.sum(0) if facts.partial and size_of(mesh.tp) > 1 else rows[0]
    shared = facts.replicas.tp
    return torch.cat([rows[i : i + shared].sum(0) for i in range(0, len(rows), shared)], facts.shard_dim)


def _run(mesh: Mesh, kind: str, sequence_parallel: bool, stride: str) -> dict[str, torch.Tensor]:
    """Output, input gradient and full parameter gradients under a loss that weighs every output differently."""
    module = KINDS[kind](mesh.tp, sequence_parallel).double()
    initialize(module, seed=3)
    whole = _input(stride)
    split = sequence_parallel and mesh.tp is not None
    length = 8 // size_of(mesh.tp) if split else 8
    part = slice(mesh.tp_rank * length, (mesh.tp_rank + 1) * length) if split else slice(None)
    leaf = whole[:, part].clone(memory_format=torch.preserve_format).requires_grad_()
    output = module(STRIDES[stride](leaf) if stride == "sliced" else leaf)
    weight = torch.linspace(-1, 1, whole.numel(), dtype=torch.float64).view(whole.shape)[:, part]
    # The transposed product hands backward a gradient that is not contiguous.
    (output.transpose(1, 2) * weight.transpose(1, 2)).sum().backward()
    results = {"output": output.detach(), "input": leaf.grad}
    if split:
        results = {name: all_gather(tensor.contiguous(), mesh.tp, 1) for name, tensor in results.items()}
    for name, parameter, facts in named_parameters_with_facts(module):
        results[name] = _whole(name, parameter.grad, facts, mesh)
    return results


def _cases(mesh: Mesh) -> dict[tuple, dict[str, torch.Tensor]]:
    cases = [(kind, sp, "plain") for kind in KINDS for sp in (False, True)]
    cases += [("layer", sp, stride) for stride in STRIDES for sp in (False, True)]
    return {case: _run(mesh, *case) for case in cases}


@pytest.mark.parametrize("tp", [2, 4])
def test_outputs_and_gradients_equal_those_of_one_process(tp: int) -> None:
    alone = Mesh(Layout(), 0, torch.device("cpu"))
    for results in run_layout(Layout(tp=tp), _cases):
        for (kind, sp, stride), got in results.items():
            expected = _run(alone, kind, False, stride)
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.allclose(got[name], tensor, rtol=1e-9, atol=1e-11), (kind, sp, stride, name)


def test_one_process_equals_plain_linear_layers() -> None:
    column = KINDS["column then row"](None, False).double()
    initialize(column, seed=3)
    x = _input("transposed").requires_grad_()
    y = F.linear(F.linear(x, column[0].weight, column[0].bias), column[1].weight, column[1].bias)
    expected = torch.autograd.grad(y.square().sum(), [x, *column.parameters()])
    actual = torch.autograd.grad(column(x).square().sum(), [x, *column.parameters()])
    for left, right in zip(actual, expected, strict=True):
        assert torch.allclose(left, right, rtol=1e-12)


def test_rms_norm_equals_torchs_in_value_and_gradients() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(12, eps=1e-5).double()
    norm.weight.data.normal_()
    x = torch.randn(3, 5, 12, dtype=torch.float64, requires_grad=True)
    ours, theirs = norm(x), F.rms_norm(x, (12,), norm.weight, 1e-5)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    weight = torch.randn_like(ours)
    for left, right in zip(
        torch.autograd.grad((ours * weight).sum(), [x, norm.weight]),
        torch.autograd.grad((theirs * weight).sum(), [x, norm.weight]),
        strict=True,
    ):
        assert torch.allclose(left, right, rtol=1e-10)


def _row_bias(mesh: Mesh) -> list[float]:
    layer = RowParallelLinear(4, 1, tp=mesh.tp, bias=True)
    layer.weight.data.zero_()
    layer.bias.data.fill_(1.0)
    return layer(torch.ones(1, 2, 4 // size_of(mesh.tp))).flatten().tolist()


def test_a_row_parallel_bias_is_added_once() -> None:
    assert run_layout(Layout(tp=2), _row_bias) == [[1.0, 1.0], [1.0, 1.0]]


def _vocabulary(mesh: Mesh) -> dict[str, torch.Tensor]:
    """Embedding and loss of a vocabulary that does not divide; every rank's gradients."""
    embedding = VocabParallelEmbedding(131, 8, tp=mesh.tp, std=0.5).double()
    initialize(embedding, seed=5)
    ids = torch.arange(0, 131, 3).view(1, -1)
    hidden = embedding(ids)
    logits = (hidden @ embedding.weight.t()).requires_grad_()
    logits.retain_grad()
    labels = ((ids * 7) % 131).masked_fill(ids % 2 == 0, -100)
    losses = vocab_parallel_cross_entropy(logits, labels, vocab_size=131, tp=mesh.tp)
    losses.sum().backward()
    return {
        "hidden": hidden.detach(),
        "losses": losses.detach(),
        "logits": all_gather(logits.grad, mesh.tp, 2),
        "weight": all_gather(embedding.weight.grad, mesh.tp, 0),
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_vocabulary_that_does_not_divide_is_padded_without_a_trace(tp: int) -> None:
    layout = Layout(tp=tp)
    embedding = VocabParallelEmbedding(131, 8, std=0.5).double()
    initialize(embedding, seed=5)
    table = embedding.weight.detach()[:131].clone().requires_grad_()
    ids = torch.arange(0, 131, 3).view(1, -1)
    hidden = F.embedding(ids, table)
    # tp ranks each compute the head's input gradient for their own columns only: the hidden of this check is a constant.
    logits = hidden @ table.t()
    logits.retain_grad()
    labels = ((ids * 7) % 131).masked_fill(ids % 2 == 0, -100)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    losses.sum().backward()
    for got in run_layout(layout, _vocabulary):
        assert torch.allclose(got["hidden"], hidden.detach())
        assert torch.allclose(got["losses"].flatten().double(), losses.detach(), rtol=1e-6)
        assert torch.allclose(got["logits"][..., :131], logits.grad, atol=1e-7)
        assert (got["logits"][..., 131:] == 0).all()
        assert (got["weight"][131:] == 0).all()


def _sliced_logits(mesh: Mesh) -> tuple[float, str]:
    logits = torch.zeros(1, 1, 64)
    whole = torch.tensor([2.0, 1.0, 0.0, -1.0])
    # Four tokens over two ranks, as a vocabulary of 66 would have them: 64 and 2 real columns; use the toy's own numbers.
    logits[0, 0, :2] = whole[:2] if mesh.tp_rank == 0 else whole[2:]
    logits[0, 0, 2:] = -torch.inf if mesh.tp_rank == 0 else 0.0
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[0]]), vocab_size=66, tp=mesh.tp)
    try:
        vocab_parallel_cross_entropy(torch.zeros(1, 1, 128), torch.tensor([[0]]), vocab_size=66, tp=mesh.tp)
    except ValueError as error:
        return loss.item(), str(error)
    return loss.item(), "accepted"


def test_whole_logits_are_refused_by_the_vocabulary_parallel_loss() -> None:
    for loss, error in run_layout(Layout(tp=2), _sliced_logits):
        assert loss == pytest.approx(0.440190, abs=1e-6)
        assert "128 columns" in error and "64" in error


def test_heads_and_features_that_do_not_divide_name_the_sizes() -> None:
    from parallax.mesh import plan_mesh

    tp = plan_mesh(Layout(tp=4), 0).tp
    with pytest.raises(ValueError, match="6 query heads"):
        ParallelAttention(12, 6, tp=tp)
    with pytest.raises(ValueError, match="out_features=30"):
        ParallelMLP(16, 30, tp=tp)
    with pytest.raises(ValueError, match="in_features=30"):
        RowParallelLinear(30, 16, tp=tp)


def _gathered(mesh: Mesh) -> dict[str, torch.Tensor]:
    layer = ColumnParallelLinear(16, 24, tp=mesh.tp, bias=True, gather_output=True, std=0.3).double()
    initialize(layer, seed=3)
    leaf = _input("plain").requires_grad_()
    output = layer(leaf)
    (output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)).sum().backward()
    weight = _whole("weight", layer.weight.grad, layer.parameter_facts["weight"], mesh)
    return {"output": output.detach(), "input": leaf.grad, "weight": weight}


def test_gathered_outputs_are_whole_and_send_back_their_own_gradients() -> None:
    (expected,) = run_layout(Layout(), _gathered)
    for got in run_layout(Layout(tp=2), _gathered):
        for name, tensor in expected.items():
            assert torch.allclose(got[name], tensor, rtol=1e-12), name


def test_padding_is_zero_before_any_initialisation_by_name() -> None:
    embedding, head = VocabParallelEmbedding(100, 16), ColumnParallelLinear(16, 100, padded_out_features=128)
    assert (embedding.weight[100:] == 0).all() and (head.weight[100:] == 0).all()
    assert (embedding(torch.tensor([110, 127])) == 0).all()
    assert embedding.weight[:100].std() > 0.01 and head.weight[:100].std() > 0.01
