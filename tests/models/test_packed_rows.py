"""A packed row against its documents alone: logits and gradients, for every family, recomputation and layout."""

import dataclasses
from itertools import accumulate

import pytest
import torch

from parallax.collectives import all_gather, all_reduce_
from parallax.mesh import Layout, Mesh
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage
from parallax.models.packed_rows import PackedRows
from parallax.tensor_parallel.facts import initialize, named_parameters_with_facts
from tests.checkpoint.runs import GPT2, LLAMA, TIED
from tests.distributed.harness import run_layout

MODELS = {
    "gpt2": GPT2,
    "llama, grouped": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3, tied": TIED,
}
# Two rows, cut differently; a document of one token; the same number at the end of a row and the start of the next.
ROWS = ((5, 1, 10), (3, 13))
DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 10, [2] * 3 + [3] * 13], dtype=torch.int32)
POSITIONS = torch.tensor([[*range(5), 0, *range(10)], [*range(3), *range(13)]])
BATCH = {"documents": DOCUMENTS, "positions": POSITIONS}
IDS = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(3))
TARGETS = torch.randn((2, 16, 131), generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def make_stage(config: DecoderConfig, mesh: Mesh | None, recompute: str, dtype: torch.dtype) -> DecoderStage:
    tp = None if mesh is None else mesh.tp
    stage = DecoderStage(config, tp=tp, sequence_parallel=mesh is not None, recompute=recompute).to(dtype)
    initialize(stage, seed=1)
    for name, parameter, facts in named_parameters_with_facts(stage):  # constants would hide mistakes, small ones too
        full = torch.randn(facts.full_shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
        start, held = facts.start, facts.held(parameter.detach())
        held += 0.2 * full[tuple(slice(s, s + n) for s, n in zip(start, held.shape, strict=True))]
    return stage


def documents_alone(stage: DecoderStage) -> torch.Tensor:
    """Run each document by itself; return the logits `[2, 16, vocab]`, put together again."""
    rows = []
    for row, lengths in enumerate(ROWS):
        stops = list(accumulate(lengths))
        rows.append([stage(IDS[row : row + 1, a:b]) for a, b in zip([0, *stops], stops, strict=False)])
    return torch.cat([torch.cat(row, 1) for row in rows])[..., :131]


def gradients(stage: DecoderStage, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    stage.zero_grad()
    (logits * targets.to(logits.dtype)).sum().backward()
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def largest(tensors: dict[str, torch.Tensor]) -> float:
    """Of all, for some gradients are zero but for rounding: a constant added to all keys changes nothing."""
    return max(float(tensor.abs().max()) for tensor in tensors.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_packed_row_gives_the_logits_and_gradients_of_its_documents_alone(model: str, recompute: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        stage = make_stage(MODELS[model], None, recompute, dtype)
        alone = documents_alone(stage)
        packed = stage(IDS, PackedRows.from_batch(BATCH))[..., :131]
        torch.testing.assert_close(packed, alone, atol=tolerance, rtol=tolerance)
        expected = gradients(stage, alone, TARGETS)
        for name, gradient in gradients(stage, packed, TARGETS).items():
            scale = largest(expected)
            torch.testing.assert_close(gradient, expected[name], atol=tolerance * scale, rtol=0, msg=name)


def packed_under_tensor_parallelism(mesh: Mesh) -> list[str]:
    """Return what differs between a packed row on two ranks, sequence-parallel, and its documents alone on one."""
    wrong = []
    for model, config in MODELS.items():
        recompute = "full" if model == "qwen2" else "selective"
        reference, stage = (make_stage(config, one, recompute, torch.float64) for one in (None, mesh))
        alone = documents_alone(reference)
        expected = gradients(reference, alone, TARGETS)
        packed = stage(IDS, PackedRows.from_batch(BATCH))
        whole = all_gather(packed.detach(), mesh.tp, 2)[..., :131]
        if not torch.allclose(whole, alone, atol=1e-12, rtol=1e-12):
            wrong.append(f"{model} logits")
        width, first = packed.shape[-1], mesh.tp_rank * packed.shape[-1]
        own = torch.zeros(2, 16, width, dtype=torch.float64)
        own[..., : max(0, min(width, 131 - first))] = TARGETS[..., first : first + width]
        found = gradients(stage, packed, own)
        for name, _, facts in named_parameters_with_facts(stage, mesh.tp):
            gradient = facts.held(found[name])
            if facts.partial and facts.replicas.tp == mesh.layout.tp:
                gradient = all_reduce_(gradient.contiguous(), mesh.tp)
            box = tuple(slice(s, s + n) for s, n in zip(facts.start, gradient.shape, strict=True))
            if not torch.allclose(gradient, expected[name][box], atol=1e-11 * largest(expected)):
                wrong.append(f"{model} {name}")
    return wrong


def test_packed_rows_are_the_same_with_sequence_parallelism() -> None:
    assert run_layout(Layout(tp=2), packed_under_tensor_parallelism) == [[], []]


def test_rows_of_one_document_each_are_plain_causal_rows() -> None:
    assert PackedRows.from_batch({"input_ids": IDS}) is None
    rows = PackedRows.from_batch({"documents": torch.tensor([[7] * 16, [7] * 16])})
    assert rows is not None and rows.lengths == ()
    stage = make_stage(LLAMA, None, "none", torch.float32)
    assert torch.equal(stage(IDS, rows), stage(IDS))


def test_positions_alone_leave_attention_as_it_is() -> None:
    stage = make_stage(GPT2, None, "none", torch.float64)
    positions = torch.arange(16).expand(2, 16)
    assert torch.equal(stage(IDS, PackedRows.from_batch({"positions": positions})), stage(IDS))
    # Rotary positions count differences only: a constant is not seen, a restart inside the row is.
    stage = make_stage(LLAMA, None, "none", torch.float64)
    shifted = stage(IDS, PackedRows.from_batch({"positions": positions + 9}))
    torch.testing.assert_close(shifted, stage(IDS), atol=1e-5, rtol=1e-5)
    restarted = stage(IDS, PackedRows.from_batch({"positions": POSITIONS}))
    assert (restarted - stage(IDS)).abs()[0, 5:].amax(-1).min() > 1e-3


def test_documents_are_cut_in_order_and_at_the_ends_of_rows() -> None:
    rows = PackedRows.from_batch(BATCH)
    assert rows is not None and rows.bounds is not None
    assert rows.lengths == (5, 1, 10, 3, 13)
    assert rows.bounds.dtype == torch.int32 and rows.bounds.tolist() == [0, 5, 6, 16, 19, 32]
    assert rows.positions is POSITIONS
