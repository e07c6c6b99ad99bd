"""`parallax checkpoint`: good, damaged and missing checkpoints."""

from pathlib import Path

import pytest

from parallax.checkpoint.save import save
from tests.checkpoint.runs import LLAMA, build_parts, single_process_mesh
from tests.cli.test_schedule_command import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two checkpoints, the newer one damaged."""
    folder, mesh = tmp_path_factory.mktemp("run"), single_process_mesh()
    parts = build_parts(mesh, LLAMA, zero=0, seed=1)
    for step in (10, 20):
        save(folder / "checkpoints", step, parts, mesh)
    shard = next((folder / "checkpoints" / "step-00000020" / "model").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return folder


def test_verify_proves_a_good_checkpoint(capsys: pytest.CaptureFixture, folder: Path) -> None:
    status, out, err = run(capsys, f"checkpoint verify {folder / 'checkpoints' / 'step-00000010'}")
    assert (status, err) == (0, "")
    assert "step 10, " in out and out.endswith("as they were saved\n")


def test_verify_says_what_is_damaged_and_returns_1(capsys: pytest.CaptureFixture, folder: Path) -> None:
    status, out, err = run(capsys, f"checkpoint verify {folder / 'checkpoints' / 'step-00000020'}")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1 and "is damaged: its checksum is not the one that was saved" in err


def test_list_shows_the_newest_first_with_what_is_missing(capsys: pytest.CaptureFixture, folder: Path) -> None:
    (folder / "checkpoints" / "step-00000030").mkdir()
    status, out, err = run(capsys, f"checkpoint list {folder}")
    assert (status, err) == (0, "")
    assert run(capsys, f"checkpoint list {folder / 'checkpoints'}") == (status, out, err)
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["30", "20", "10"]
    # A list looks at sizes only; what a file holds is left to verify.
    assert "manifest" in lines[0] and lines[1].endswith("complete") and lines[2].endswith("complete")


def test_what_is_no_checkpoint_and_no_run_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    for command, words in (("verify", "there is no folder"), ("list", "holds no run")):
        status, out, err = run(capsys, f"checkpoint {command} {tmp_path / 'absent'}")
        assert (status, out) == (2, "") and err.count("\n") == 1 and words in err
    (tmp_path / "checkpoints").mkdir()
    assert run(capsys, f"checkpoint list {tmp_path}")[:2] == (0, f"no checkpoints in {tmp_path / 'checkpoints'}\n")
    status, out, err = run(capsys, f"checkpoint verify {tmp_path}")
    assert (status, out) == (2, "") and f"{tmp_path} holds no checkpoint; give one, or a run, as in" in err


def test_verify_of_a_run_proves_all_its_checkpoints(capsys: pytest.CaptureFixture, folder: Path) -> None:
    for given in (folder, folder / "checkpoints"):
        status, out, err = run(capsys, f"checkpoint verify {given}")
        assert status == 1 and out.count("as they were saved") == 1 and "step-00000010: step 10, " in out
        assert "step-00000020" in err and "is damaged" in err


def test_a_step_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture, folder: Path) -> None:
    status, out, err = run(capsys, f"checkpoint verify {folder / 'checkpoints' / 'step-00000400'}")
    assert (status, out) == (2, "") and "step-00000020, step-00000010" in err and "parallax checkpoint list" in err
