"""pretrain.py from end to end on a small text: what it leaves behind, and going on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallax.errors import ConfigError
from parallax.mesh import Layout, Mesh
from parallax.training import flops
from parallax.training.run_lock import only_run_in
from tests.checkpoint.runs import rewrite_manifest, single_process_mesh
from tests.distributed.harness import run_layout
from tests.training.runs import contents, metrics, run, saved, write_text

KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "step_seconds", "memory_bytes"} | {
    "phases",
    "straggler",
    "straggler_seconds",
    "sent",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path)
    return tmp_path


def test_a_run_leaves_metrics_events_and_a_checkpoint_that_transformers_opens(folder: Path) -> None:
    command = f"--out {folder}/run --steps 6 --eval-every 3 --eval-steps 2 --log-every 2 --save-every 4 --lr 1e-2"
    assert run_layout(Layout(), run, [command], str(folder)) == [[[]]]
    rows = metrics(folder / "run")
    assert [row["step"] for row in rows] == [2, 3, 4, 6]
    assert all(row.keys() - {"eval_loss", "memory"} == KEYS for row in rows)
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6]
    assert [row["step"] for row in rows if "memory" in row] == [2]
    assert rows[-1]["tokens"] == 6 * 8 * 16
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["eval_loss"] < rows[1]["eval_loss"]
    assert list((folder / "run" / "tensorboard").glob("events*"))
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    transformers = pytest.importorskip("transformers", reason="the test extra brings it")
    model = folder / "run" / "checkpoints" / "step-00000006" / "model"
    opened = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert opened(**tokenizer("line 1: 1 sheep", return_tensors="pt")).logits.shape[-1] == opened.config.vocab_size


def test_a_utilisation_that_cannot_be_is_not_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peak is measured to be next to nothing: as on a machine that was busy only at the start."""
    for share, known in ((1e-9, False), (1e9, True)):
        monkeypatch.setattr(flops, "measured_flops", lambda *_, s=share: 1e11 * s)
        command = f"--out {folder}/{known} --steps 4 --eval-every 0 --log-every 1"
        assert run(single_process_mesh(), [command], str(folder)) == [[]]
        out = capsys.readouterr().out
        assert [row["mfu"] is not None for row in metrics(folder / str(known))] == [known] * 4
        assert out.count("  mfu ") == (4 if known else 0) and out.count("mfu            unknown: ") == (not known)


def test_a_command_that_has_nothing_to_do_leaves_the_record_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"--out {folder}/run --steps 2 --eval-every 0 --warmup-steps 1"
    assert run(single_process_mesh(), [command], str(folder)) == [[]]
    before = (folder / "run" / "config.json").read_bytes()
    capsys.readouterr()
    assert run(single_process_mesh(), [f"{command} --log-every 7"], str(folder)) == [[]]
    assert "step 2 of 2 is done; ask for more --steps (and --lr-decay-steps 2, as before)" in capsys.readouterr().out
    assert (folder / "run" / "config.json").read_bytes() == before
    longer = f"--out {folder}/run --steps 3 --eval-every 0 --warmup-steps 1 --lr-decay-steps 2"
    assert run(single_process_mesh(), [longer], str(folder)) == [[]]
    assert (folder / "run" / "config.json").read_bytes() != before


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_where_every_checkpoint_is_damaged_no_new_run_overwrites_them(resume: str, folder: Path) -> None:
    command = f"--out {folder}/run --steps 4 --save-every 2 --eval-every 0"
    assert run(single_process_mesh(), [command], str(folder)) == [[]]
    for step in (folder / "run" / "checkpoints").iterdir():
        (step / "model" / "training_args.bin").touch()  # what looks like a pickle is refused
    before = contents(folder / "run")
    ((problem,),) = run(single_process_mesh(), [f"{command} --resume {resume}"], str(folder))
    assert "holds the checkpoints step-00000004, step-00000002, and none is whole" in problem
    assert contents(folder / "run") == before


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)], ids=str)
def test_four_steps_equal_two_and_two_more_bit_for_bit(layout: Layout, folder: Path) -> None:
    always = f"--tp {layout.tp} --pp {layout.pp} --eval-every 0 --lr-decay-steps 4 --warmup-steps 1"
    commands = [
        f"{always} --out {folder}/whole --steps 4",
        f"{always} --out {folder}/parts --steps 2",
        f"{always} --out {folder}/parts --steps 4",
    ]
    assert run_layout(layout, run, commands, str(folder)) == [[[], [], []]] * layout.world_size
    whole, parts = metrics(folder / "whole"), metrics(folder / "parts")
    for name in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in whole] == [row[name] for row in parts], name
    last = "checkpoints/step-00000004"
    assert contents(folder / "whole" / last) == contents(folder / "parts" / last)


def test_bf16_goes_on_from_its_fp32_main_parameters(folder: Path) -> None:
    always = "--precision bf16 --eval-every 0 --lr-decay-steps 4 --warmup-steps 1"
    commands = [
        f"{always} --out {folder}/whole --steps 4",
        f"{always} --out {folder}/parts --steps 2",
        f"{always} --out {folder}/parts --steps 4",
    ]
    run_layout(Layout(dp=2), run, commands, str(folder))
    last = "checkpoints/step-00000004"
    assert contents(folder / "whole" / last) == contents(folder / "parts" / last)


def test_another_layout_goes_on_with_the_same_losses(folder: Path) -> None:
    always = "--eval-every 0 --lr-decay-steps 4 --warmup-steps 1"
    whole, parts = folder / "whole", folder / "parts"
    run_layout(Layout(), run, [f"{always} --out {whole} --steps 4", f"{always} --out {parts} --steps 2"], str(folder))
    run_layout(Layout(tp=2), run, [f"{always} --tp 2 --zero 0 --out {parts} --steps 4"], str(folder))
    for row, other in zip(metrics(whole), metrics(parts), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)


def test_a_changed_run_is_refused_with_what_changed(folder: Path) -> None:
    commands = [
        f"--out {folder}/run --steps 2 --lr-decay-steps 4",
        f"--out {folder}/run --steps 4 --lr-decay-steps 4 --lr 0.5 --seed 9",
        f"--out {folder}/run --steps 4 --lr-decay-steps 4 --log-every 2 --zero 0 --micro-batch 1",
    ]
    ((none, changed, harmless),) = run_layout(Layout(), run, commands, str(folder))
    assert none == harmless == []
    assert any("lr was 0.001 and is now 0.5" in problem for problem in changed)
    assert any("seed was 0 and is now 9" in problem for problem in changed)
    (folder / "text.txt").write_text(
        "another text altogether, and long enough to cut into samples of sixteen bytes. " * 30
    )
    ((problems,),) = run_layout(Layout(), run, [f"--out {folder}/run --steps 6 --lr-decay-steps 4"], str(folder))
    assert any("text.txt has changed" in problem for problem in problems)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder: Path) -> None:
    always = "--eval-every 0 --lr-decay-steps 4 --warmup-steps 1 --save-every 1"
    run_layout(
        Layout(),
        run,
        [f"{always} --out {folder}/whole --steps 4", f"{always} --out {folder}/parts --steps 3"],
        str(folder),
    )
    newest = folder / "parts" / "checkpoints" / "step-00000003"
    for name, older in (("state.json", "step-00000002"), ("optimizer", "step-00000001")):
        victim = (
            newest / name if name == "state.json" else sorted((newest.parent / "step-00000002" / name).iterdir())[0]
        )
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
        assert (newest.parent / older).is_dir()
    run_layout(Layout(), run, [f"{always} --out {folder}/parts --steps 4"], str(folder))
    last = "checkpoints/step-00000004"
    assert contents(folder / "whole" / last) == contents(folder / "parts" / last)


def test_a_fresh_start_does_not_mix_with_an_older_run(folder: Path) -> None:
    commands = [f"--out {folder}/run --steps 1", f"--out {folder}/run --steps 1 --resume none"]
    (((), (problem,)),) = run_layout(Layout(), run, commands, str(folder))
    assert "--resume none would mix" in problem


def test_numbers_that_are_none_stop_the_run_before_they_are_saved(folder: Path) -> None:
    commands = [f"--out {folder}/run --steps 6 --lr 1e30 --warmup-steps 0 --save-every 1 --eval-every 0"]
    ((problems,),) = run_layout(Layout(), run, commands, str(folder))
    assert len(problems) == 1 and "training stops without saving" in problems[0] and "lower --lr" in problems[0]
    assert all("NaN" not in line for line in (folder / "run" / "metrics.jsonl").read_text().splitlines())
    names = saved(folder / "run")
    assert len(names) == len(metrics(folder / "run"))


def test_a_folder_belongs_to_one_run_at_a_time(folder: Path) -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    with only_run_in(folder / "run", mesh):
        # Before anything else: what is chosen to go on from could be old by the time the other run ends.
        commands = [f"--out {folder}/run --steps 1", f"--out {folder}/run --steps 1 --resume {folder}"]
        ((first, second),) = run_layout(Layout(), run, commands, str(folder))
    assert "another run is writing to" in first[0] and first == second
    assert not (folder / "run").exists()
    assert run_layout(Layout(), run, [f"--out {folder}/run --steps 1"], str(folder)) == [[[]]]


def test_a_lock_whose_file_was_removed_is_taken_again_or_the_run_ends(folder: Path) -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    with only_run_in(folder / "run", mesh) as first:
        (folder / "run" / ".lock").unlink()
        first.hold()
        with pytest.raises(ConfigError, match="another run is writing"), only_run_in(folder / "run", mesh):
            pass
        (folder / "run" / ".lock").unlink()
        with only_run_in(folder / "run", mesh), pytest.raises(ConfigError, match="another run is writing"):
            first.hold()


def test_a_start_that_is_refused_leaves_no_folder(folder: Path) -> None:
    command = f"--out {folder}/new/run --steps 1 --resume {folder}"
    (((problem,),),) = run_layout(Layout(dp=2), run, [command], str(folder))[:1]
    assert f"{folder} is no complete checkpoint" in problem
    assert not (folder / "new").exists()


def test_a_run_in_place_of_a_checkpoint_is_told_with_its_newest(folder: Path) -> None:
    commands = [f"--out {folder}/run --steps 1", f"--out {folder}/other --steps 1 --resume {folder}/run"]
    (((), (problem,)),) = run_layout(Layout(), run, commands, str(folder))
    assert f"give --resume {folder}/run/checkpoints/step-00000001, or --out {folder}/run" in problem


def _count_another_step(state: dict) -> None:
    state["training"]["counters"]["step"] = 3


def _leave_out_the_identity(state: dict) -> None:
    state["training"]["identity"] = None


def _leave_out_a_layer(state: dict) -> None:
    state["training"]["fp8"]["layers"].popitem()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_count_another_step, "state.json is of step 2, and its counters are of 3"),
        (_leave_out_the_identity, "is of another run: its identity is none that a run has"),
        (_leave_out_a_layer, "state.json has no scales for this run's FP8 layers"),
    ],
)
def test_a_state_that_no_run_saved_is_refused_in_a_sentence(
    change: Callable[[dict], None], words: str, folder: Path
) -> None:
    command = f"--out {folder}/run --precision fp8 --fp8-recipe delayed --fp8-backend reference --lr-decay-steps 4"
    assert run_layout(Layout(dp=2), run, [f"{command} --steps 2"], str(folder)) == [[[]]] * 2
    checkpoint = folder / "run" / "checkpoints" / "step-00000002"
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    rewrite_manifest(checkpoint, "state.json")
    first, second = run_layout(Layout(dp=2), run, [f"{command} --steps 4"], str(folder))
    assert first == second and len(first[0]) == 1 and words in first[0][0]


def test_going_on_from_an_older_checkpoint_does_not_overwrite_newer_ones(folder: Path) -> None:
    first = f"{folder}/run/checkpoints/step-00000001"
    commands = [
        f"--out {folder}/run --steps 2 --save-every 1 --lr-decay-steps 2",
        f"--out {folder}/run --steps 2 --lr-decay-steps 2 --resume {first}",
        f"--out {folder}/fork --steps 2 --lr-decay-steps 2 --resume {first}",
    ]
    (((), (problem,), ()),) = run_layout(Layout(), run, commands, str(folder))
    assert "would overwrite the newer checkpoints" in problem


def test_old_checkpoints_go_as_new_ones_come(folder: Path) -> None:
    command = f"--out {folder}/run --steps 7 --save-every 1 --keep 2 --keep-every 3 --eval-every 0"
    assert run_layout(Layout(dp=2), run, [command], str(folder)) == [[[]]] * 2
    assert saved(folder / "run") == ["step-00000003", "step-00000006", "step-00000007"]
