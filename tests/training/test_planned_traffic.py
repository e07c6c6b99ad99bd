"""What a rank sends in a real step along tp and pp, counted, against the plan: equal to the byte."""

from __future__ import annotations

import pytest
import torch

from parallax.config import PretrainConfig
from parallax.mesh import Layout, Mesh
from parallax.objectives.next_token import NextToken
from parallax.training.build import build_train_step
from parallax.training.plan import make_plan
from parallax.training.record import StepRecorder
from tests.distributed.harness import run_layout
from tests.training.test_plan import SMALL, config_of

PAIRED = ("dualpipe", "dualpipev", "interleaved-paired")
SCHEDULES = ("1f1b", "zb-h1", "zb-v", *PAIRED)
SPLIT = f"{SMALL} --tp 2 --pp 2 --global-batch 8 --micro-batch 1"
CASES = {
    Layout(tp=2, pp=2): [
        *(f"{SPLIT} --schedule {schedule} {words}" for schedule in SCHEDULES for words in ("", "--sp")),
        *(
            f"{SPLIT} --schedule {schedule} --sp --recompute {kind}"
            for schedule in PAIRED
            for kind in ("selective", "full")
        ),
        *(
            f"{SPLIT} --schedule {schedule} --sp --loss-chunk 8"
            for schedule in ("1f1b", "dualpipev", "interleaved-paired")
        ),
    ],
    Layout(tp=4): [f"{SMALL} --tp 4 --global-batch 2 {words}" for words in ("", "--sp", "--sp --loss-chunk 8")],
}


def _sent(mesh: Mesh, cases: list[str]) -> list[tuple[int, int]]:
    return [_sent_in(mesh, config_of(words)) for words in cases]


def _sent_in(mesh: Mesh, config: PretrainConfig) -> tuple[int, int]:
    """Return the bytes that this rank sends in a step along tp and pp, without what has a few bytes per token."""
    training, model = config.training, config.model_config
    step = build_train_step(
        mesh,
        model,
        config.stage_ranges,
        config.schedule,
        training,
        config.optimizer,
        NextToken(model.vocab_size, mesh.tp),
        sequence_parallel=config.parallel.sp,
    )
    ids = torch.randint(0, model.vocab_size, (training.micro_batch, training.seq_len))
    recorder = StepRecorder(mesh)
    step([{"input_ids": ids, "labels": ids}] * config.num_micro_batches, 1e-3, recorder)
    recorder.end()
    whole = ids.numel() * model.hidden_size * 4
    of_tp = [call for call in recorder.calls if call.group == "tp" and call.num_bytes >= whole]
    spec = step.runner.spec
    return sum(call.sent_bytes for call in of_tp), recorder.traffic(torch.Size(spec.shape).numel() * 4)["pp"][1]


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.slow) if one.pp > 1 else one for one in CASES], ids=str
)
def test_a_step_sends_what_the_plan_says_to_the_byte(layout: Layout) -> None:
    for rank, row in enumerate(run_layout(layout, _sent, CASES[layout])):
        for words, sent in zip(CASES[layout], row, strict=True):
            planned = make_plan(config_of(words)).ranks[layout.coordinates(rank)["pp"]].traffic
            assert sent == (planned.tp, planned.pp), (words, rank)
