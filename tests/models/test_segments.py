"""A stage cut into segments computes what the stage computes: outputs and gradients in float64, for every kind of layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from parallax.mesh import Layout, Mesh
from parallax.models.config import DecoderConfig
from parallax.models.packed_rows import PackedRows
from parallax.models.stages import build_stages
from parallax.pipeline.segments import alone, backward_steps, forward_steps, in_turn
from parallax.tensor_parallel.segments import merged
from parallax.tensor_parallel.weight_gradients import WeightQueue, attach_queue
from tests.distributed.harness import run_layout
from tests.distributed.training import SMALL

LLAMA = replace(SMALL, num_hidden_layers=2)
MODELS = {
    "llama": LLAMA,
    "one kv head, wide heads": replace(LLAMA, num_key_value_heads=1, head_dim=16),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, tie_word_embeddings=True),
    "gpt2": replace(
        LLAMA,
        family="gpt2",
        norm="layernorm",
        activation="gelu",
        positions="learned",
        bias=True,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
}
RECOMPUTE = ("none", "selective", "full")
SEQ = 8


def rows_of(batch: int) -> PackedRows:
    """Return rows of two texts each."""
    documents = (torch.arange(SEQ) >= 3).long().expand(batch, SEQ)
    positions = torch.cat([torch.arange(3), torch.arange(SEQ - 3)]).expand(batch, SEQ)
    rows = PackedRows.from_batch({"documents": documents, "positions": positions})
    assert rows is not None
    return rows


def gradients(stage: torch.nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in stage.parameters()]
    for parameter in stage.parameters():
        parameter.grad = None
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def check(mesh: Mesh, model: DecoderConfig, recompute: str, sp: bool, part: int, packed: bool, exact: bool) -> None:
    """part: 0 the whole model as one stage; 1, 2: the first and the last of two."""
    layers = [range(0, 2)] if part == 0 else [range(0, 1), range(1, 2)]
    holders = [[0]] if part == 0 else [[part == 2], [part == 1]]
    stages = build_stages(
        model,
        layers,
        holders,
        0,
        seed=3,
        device=mesh.device,
        dtype=torch.float64,
        tp=mesh.tp,
        sequence_parallel=sp,
        recompute=recompute,
    )
    (stage,) = stages.values()
    for module in stage.modules() if exact else ():
        if hasattr(module, "exact_sums"):
            module.exact_sums = True
    queue = WeightQueue()
    attach_queue(stage, queue)
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(0, model.vocab_size, (2, SEQ), generator=generator) for _ in range(2)]
    rows = rows_of(2) if packed else None
    tp = mesh.layout.tp
    length = SEQ // tp if sp else SEQ
    hiddens = [torch.randn(2, SEQ, model.hidden_size, generator=generator, dtype=torch.float64) for _ in range(2)]
    hiddens = [hidden[:, mesh.tp_rank * length :][:, :length].contiguous() if sp else hidden for hidden in hiddens]
    if stage.spec.is_first:
        hiddens = [None, None]
    inputs = [ids[0] if hidden is None else hidden.clone().requires_grad_() for hidden in hiddens]
    expected = [stage(tensor, rows) for tensor in inputs]
    weights = [torch.rand(output.shape, generator=generator, dtype=torch.float64) for output in expected]
    if stage.spec.is_first:
        expected[1] = stage(ids[1], rows)
    for output, weight in zip(expected, weights, strict=True):
        output.backward(weight)
    right = gradients(stage)

    def same(got: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> None:
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)

    for split, cut in itertools.product((False, True), (merged, list)):
        first, second = (forward_steps(cut(stage.segments(tokens, rows)), None, True, True) for tokens in ids)
        if not stage.spec.is_first:
            first, second = (
                forward_steps(cut(stage.segments(ids[0], rows)), hidden.clone(), True, False) for hidden in hiddens
            )
        output, trace = alone(first)
        assert trace is not None
        # The second's forward and the first's backward take turns, as in a pair.
        (later, later_trace), gradient = in_turn(second, backward_steps(trace, weights[0], queue, 0, split))
        assert later_trace is not None
        later_gradient = alone(backward_steps(later_trace, weights[1], queue, 1, split))
        assert queue.run(0) + queue.run(1) > 0 if split else queue.run(0) + queue.run(1) == 0
        same((output, later), (expected[0].detach(), expected[1].detach()))
        same(gradients(stage), right)
        if not stage.spec.is_first:
            same((gradient, later_gradient), (inputs[0].grad, inputs[1].grad))


def check_all(mesh: Mesh, model: DecoderConfig) -> None:
    for recompute, part in itertools.product(RECOMPUTE, (0, 1, 2)):
        for sp in (False, True) if mesh.layout.tp > 1 else (False,):
            check(mesh, model, recompute, sp, part, packed=part == 1, exact=recompute == "selective")


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_stage_in_segments_equals_the_stage(name: str, layout: Layout) -> None:
    run_layout(layout, check_all, MODELS[name])
