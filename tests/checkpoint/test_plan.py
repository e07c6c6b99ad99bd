"""Who writes what: layout-independent files, balanced writers, bounded rounds; for layouts far larger than this machine."""

import json
from collections import Counter

import pytest
import torch

from parallax.checkpoint import plan
from parallax.checkpoint.holdings import Share, Source, Sources, collect, describe
from parallax.checkpoint.parts import CheckpointParts
from parallax.mesh import Layout, plan_mesh
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage, StageSpec
from parallax.tensor_parallel.facts import named_parameters_with_facts
from tests.checkpoint.runs import GPT2, LLAMA, TIED


def described(layout: Layout, config: DecoderConfig) -> tuple[CheckpointParts, Sources]:
    """Return rank 0's parts and what all ranks of a layout hold, without processes; one layer per stage at least."""
    parameters: dict[str, list] = {}
    pieces: dict[str, list] = {}
    first = None
    for rank in range(layout.world_size):
        mesh = plan_mesh(layout, rank)
        layers = range(config.num_hidden_layers)[mesh.pp_rank :: layout.pp]
        stage = DecoderStage(config, StageSpec(layers, mesh.pp_rank, layout.pp), tp=mesh.tp)
        parts = CheckpointParts(config, list(named_parameters_with_facts(stage)))
        first = first or parts
        for tables, table in zip((parameters, pieces), describe(parts), strict=True):
            tables.setdefault(json.dumps(table), []).append(rank)
    assert first is not None
    return first, collect(
        *({tuple(ranks): json.loads(table) for table, ranks in t.items()} for t in (parameters, pieces))
    )


def planned(layout: Layout, config: DecoderConfig) -> tuple[list[plan.FilePlan], Sources]:
    parts, sources = described(layout, config)
    return plan.plan_files({"model/model": plan.model_targets(parts, sources)}, sources), sources


@pytest.mark.parametrize("config", [LLAMA, TIED, GPT2], ids=["llama", "tied", "gpt2"])
def test_files_do_not_depend_on_the_layout(config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_FILE_BYTES", 20_000)
    expected = [(file.name, file.header) for file in planned(Layout(), config)[0]]
    assert len(expected) > 2
    for layout in (Layout(tp=4, dp=4), Layout(pp=3, dp=2), Layout(tp=2, pp=2, dp=4)):
        assert [(file.name, file.header) for file in planned(layout, config)[0]] == expected


@pytest.mark.parametrize("layout", [Layout(dp=8), Layout(tp=4, dp=2), Layout(tp=2, pp=3, dp=2)], ids=str)
def test_no_rank_puts_together_or_sends_more_than_its_bound(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_FILE_BYTES", 6_000)
    monkeypatch.setattr(plan, "UNIT_BYTES", 1000)
    monkeypatch.setattr(plan, "ROUND_BYTES", 3000)
    files, sources = planned(layout, LLAMA)
    appended: Counter[str] = Counter()
    for units in plan.rounds(files, sources):
        total: Counter[int] = Counter()
        for unit in units:
            total += unit.bytes_by_rank()
            appended[unit.file.name] += unit.num_bytes
        assert max(total.values()) <= 3000
    assert appended == {file.name: sum(target.num_bytes for target in file.targets) for file in files}


def test_writers_share_the_bytes_and_the_whole_model_is_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_FILE_BYTES", 4_000)
    files, _ = planned(Layout(tp=2, dp=4), LLAMA)
    loads: Counter[int] = Counter()
    for file in files:
        loads[file.writer] += sum(target.num_bytes for target in file.targets)
    largest = max(sum(target.num_bytes for target in file.targets) for file in files)
    assert set(loads) == set(range(8)) and max(loads.values()) <= sum(loads.values()) / 8 + largest


def test_what_the_writer_has_itself_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    files, sources = planned(Layout(dp=8), LLAMA)
    moves = [(move, unit) for units in plan.rounds(files, sources) for unit in units for move in unit.moves]
    assert moves and all(move.sender == unit.file.writer for move, unit in moves)


def test_a_writer_holds_a_part_of_what_it_writes() -> None:
    for layout in (Layout(pp=3), Layout(pp=3, tp=2)):
        files, sources = planned(layout, TIED)
        for file in files:
            ranks = {
                rank
                for target in file.targets
                for key in target.sources
                for share in sources[key].shares
                for rank in share.ranks
            }
            assert file.writer in ranks


def test_wide_types_come_first_in_a_file_so_that_all_are_aligned() -> None:
    targets = [
        plan.Target(name, dtype, (3,), ((name, ""),)) for name, dtype in (("a", "BF16"), ("b", "F32"), ("c", "BF16"))
    ]
    sources = {(t.name, ""): Source(t.dtype, t.shape, [Share((0,), None, 0, 3)]) for t in targets}  # type: ignore[arg-type]
    (file,) = plan.plan_files({"model/model": targets}, sources)
    assert [target.name for target in file.targets] == ["b", "a", "c"]
    assert all(entry.offset % {"F32": 4, "BF16": 2}[entry.dtype] == 0 for entry in file.entries.values())


def test_a_main_param_of_the_parameters_own_type_is_not_stored_again() -> None:
    from tests.checkpoint.runs import build_parts, single_process_mesh

    for dtype, expected in ((torch.float32, []), (torch.bfloat16, ["main_param"])):
        _, rows = describe(build_parts(single_process_mesh(), LLAMA, zero=0, seed=1, dtype=dtype))
        assert rows and all(sorted(row[1]) == ["exp_avg", "exp_avg_sq", *expected] for row in rows)


def test_a_file_is_written_by_who_holds_most_of_it() -> None:
    """Of each file, a rank holds nine tenths, and the other the rest, as where ZeRO cuts a bucket."""
    targets = [plan.Target(f"t{i}", "F32", (1000,), ((f"t{i}", ""),)) for i in range(6)]
    most_of = [0, 0, 1, 1, 0, 1]
    sources: Sources = {}
    for target, most in zip(targets, most_of, strict=True):
        shares = [Share((most,), None, 0, 900), Share((1 - most,), None, 900, 1000)]  # type: ignore[arg-type]
        sources[target.name, ""] = Source("F32", (1000,), shares)
    groups = {f"model/{target.name}": [target] for target in targets}
    assert [file.writer for file in plan.plan_files(groups, sources)] == most_of


def test_what_one_rank_alone_has_is_given_to_it_before_what_others_could_write() -> None:
    """As ZeRO 3 leaves files: some on one rank, some on several in other shares, some on all."""
    sources: Sources = {}
    groups = {}
    for i in range(54):
        name = f"t{i}"
        ranks = [(1,), (0, 1), (1, 2)][i % 3]
        sizes = [1000] if len(ranks) == 1 else [400, 600]
        shares = [Share((rank,), None, 0, size) for rank, size in zip(ranks, sizes, strict=True)]  # type: ignore[arg-type]
        sources[name, ""] = Source("F32", (1000,), shares)
        groups[f"model/{name}"] = [plan.Target(name, "F32", (1000,), ((name, ""),))]
    loads = Counter(file.writer for file in plan.plan_files(groups, sources))
    assert loads == {0: 18, 1: 18, 2: 18}
