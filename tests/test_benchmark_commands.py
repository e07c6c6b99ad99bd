"""Every command in benchmarks/ starts, is documented with options that it has, and says in a sentence what it cannot do."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
COMMANDS = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in FOLDER.rglob("*.py")
    if "\ndef main() -> None:" in file.read_text()
    and file.parent.name != "pipeline"  # those are started by schedules.py
)
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *FOLDER.rglob("*.md"), *FOLDER.rglob("*.py")]
WRITTEN = re.compile(r"python (?:-m benchmarks\.([\w.]+)|benchmarks/([\w/]+)\.py)([^`\n]*)")


def run(command: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    """Run a command in this process; return what it exits with."""
    monkeypatch.setattr(sys, "argv", [command, *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(command).main()
    return ended.value.code


def test_there_are_commands() -> None:
    assert {"benchmarks.layouts", "benchmarks.checkpoints", "benchmarks.gpu.fp8"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_tells_its_options_and_measures_nothing(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.run", None)
    monkeypatch.setattr("subprocess.Popen", None)
    assert run(command, monkeypatch, "--help") == 0
    assert capsys.readouterr().out.startswith("usage:")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_documented_with_options_that_it_has(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, monkeypatch, "--help") == 0
    help = capsys.readouterr().out
    written = [found for file in DOCUMENTS for found in WRITTEN.findall(file.read_text(encoding="utf-8"))]
    mine = [
        re.sub('"[^"]*"', "", rest) for *names, rest in written if named(*names) == command
    ]  # quoted are others' options
    asked = set(re.findall(r"--[a-z-]+", " ".join(mine)))
    assert all(re.search(rf"{option}\b", help) for option in asked), f"{asked} are not all in\n{help}"
    assert command in {named(*found[:2]) for found in WRITTEN.findall((FOLDER / "README.md").read_text())}


def named(module: str, path: str) -> str:
    """Return the module of a command as a document writes it: `-m benchmarks.MODULE` or `benchmarks/PATH.py`."""
    return "benchmarks." + (module or path.replace("/", "."))


def test_all_commands_in_the_documents_exist() -> None:
    for file in DOCUMENTS:
        for module, path, _ in WRITTEN.findall(file.read_text(encoding="utf-8")):
            assert named(module, path) in COMMANDS, f"{file.name}: {module or path}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("layouts --rounds 0", "0 must be a whole number, at least 1"),
        ("layouts --gbit 0", "0 must be a number above 0"),
        ("profiles --only dp2,ep2", "--only ep2 is unknown; use one, dp2, dp4"),
        ("profiles --only one --contestants nobody", "--contestants nobody is unknown; use parallax, plain loop"),
        ("schedules overlap --only 1f1b,zb-v", "--only zb-v is unknown; use 1f1b, dualpipe, dualpipev"),
        ("schedules efficiency --slower 0", "0 must be a number above 0"),
        ("overlap_dp --only nobody", "--only nobody is in no contestant's name; they are zero 0, zero 1"),
        ("overlap_dp --ranks 1", "1 must be a whole number, at least 2"),
        ("collectives --ranks 1", "1 must be a whole number, at least 2"),
        ("checkpoints --rounds many", "many must be a whole number, at least 1"),
        ("data_build --tokenizer nowhere", "--tokenizer nowhere: there is no such file or folder"),
        ("fp8_losses --no-train --out nowhere", "--no-train: there is no run bf16, fp32, tile, delayed in nowhere"),
        ("real_model nowhere", "nowhere holds no config.json"),
        ("real_finetune nowhere", "holds no config.json"),
        ("real_finetune nowhere --layouts dp2", "--layouts dp2 is unknown; write 1, tp2, pp2 or tp2pp2"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *options = words.split()
    assert run(f"benchmarks.{command}", monkeypatch, *options) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "package"),
    [("real_model .", "transformers"), ("real_finetune .", "transformers"), ("fp8_losses --plot a.svg", "matplotlib")],
)
def test_a_package_that_is_missing_is_named_before_anything_is_measured(
    words: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command, *options = words.split()
    assert run(f"benchmarks.{command}", monkeypatch, *options) == 2
    assert f"pip install {package}" in capsys.readouterr().err


def test_links_that_this_machine_does_not_let_us_make_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    said = "not measured: links of a limited rate take root, and ip and tc of iproute2"
    assert run("benchmarks.layouts", monkeypatch, "--only", "dp2", "--gbit", "1") == said
    assert run("benchmarks.overlap_dp", monkeypatch) == said


def test_a_command_whose_run_was_refused_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = importlib.import_module("benchmarks.options")
    with pytest.raises(SystemExit) as ended:
        options.run_or_exit([sys.executable, "-c", "print('not shown'); raise SystemExit(5)"], quiet=True)
    assert ended.value.code == 5 and capfd.readouterr().out == ""
