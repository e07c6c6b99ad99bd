"""Fields as flags: names, values, files, and the sentences about what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from parallax.flags import build, flags_of, named, read_file, read_words, values_of


@dataclass(frozen=True)
class Sizes:
    """Sizes."""

    tp: Annotated[int, named("tp", "tensor-model-parallel-size")] = 1
    """A size."""
    dp: int | None = None
    """Another."""
    sp: Annotated[bool, named("sp", "sequence-parallel")] = False
    """A switch."""


@dataclass(frozen=True)
class Rest:
    """The rest."""

    lr: float = 0.5
    """A rate."""
    min_lr: float | None = None
    """A smaller one."""
    shape: Literal["cosine", "linear"] = "cosine"
    """A choice."""
    data: tuple[str, ...] = ()
    """Paths."""
    betas: tuple[float, float] = (0.9, 0.95)
    """A pair."""
    config: str | None = None
    """A file."""


@dataclass(frozen=True)
class Options:
    """Some options."""

    sizes: Sizes = field(default_factory=Sizes)
    rest: Rest = field(default_factory=Rest)


FLAGS = flags_of(Options)


def parsed(*words: str) -> Options:
    given, problems = read_words(words, FLAGS)
    assert problems == []
    return build(Options, given, FLAGS, "program")


def problems_of(*words: str) -> list[str]:
    return read_words(words, FLAGS)[1]


def test_a_field_is_a_flag_under_each_of_its_names() -> None:
    assert FLAGS["tp"].names == ("tp", "tensor-model-parallel-size")
    assert FLAGS["min-lr"].names == ("min-lr",)
    for words in (["--tp", "4"], ["--tp=4"], ["--tensor-model-parallel-size", "4"], ["--tensor_model_parallel_size=4"]):
        assert parsed(*words).sizes.tp == 4


def test_values_have_the_types_of_their_fields() -> None:
    options = parsed("--dp", "2", "--lr=1e-3", "--shape", "linear", "--data", "a", "b", "--betas", "0.8", "0.9", "--sp")
    assert options == Options(Sizes(dp=2, sp=True), Rest(lr=1e-3, shape="linear", data=("a", "b"), betas=(0.8, 0.9)))


def test_what_is_not_given_keeps_its_default() -> None:
    assert parsed() == Options()


def test_a_switch_is_turned_off_by_no() -> None:
    assert parsed("--sequence-parallel").sizes.sp
    assert not parsed("--no-sp").sizes.sp
    assert not parsed("--no-sequence-parallel").sizes.sp


def test_negative_numbers_are_values() -> None:
    assert parsed("--dp", "-1").sizes.dp == -1
    assert parsed("--lr", "-1e-3").rest.lr == -1e-3


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tpp", "2"], "--tpp is no option; the nearest is --tp"),
        (
            ["--tensor-parallel-size", "2"],
            "--tensor-parallel-size is no option; the nearest is --tensor-model-parallel-size",
        ),
        (["--min_l=2"], "--min_l is no option; the nearest is --min-lr"),
        (["--learning-rate", "2"], "--learning-rate is no option; here it is --lr"),
        (["--epochs", "2"], "--epochs is no option; --help lists all options"),  # there are no steps among these
        (["-tp", "2"], "-tp is no option; the nearest is --tp"),
        (["--xyzzy"], "--xyzzy is no option; --help lists all options"),
        (["--tp", "two"], "--tp two is no whole number"),
        (["--tp", "1.5"], "--tp 1.5 is no whole number"),
        (["--lr", "fast"], "--lr fast is no number"),
        (["--lr", "nan"], "--lr nan is no number"),
        (["--shape", "cosin"], "--shape cosin is unknown; use cosine or linear"),
        (["--tp"], "--tp needs a value"),
        (["--tp", "--sp"], "--tp needs a value"),
        (["--data"], "--data needs a value"),
        (["--betas", "0.9"], "--betas takes 2 values, not 1"),
        (["--tp", "2", "4"], "'4' belongs to no option; options begin with --"),
        (["--sp", "true"], "'true' belongs to no option; --sp takes no value"),
        (["--sp=true"], "--sp takes no value, it was given 'true'; use --sp or --no-sp"),
        (["--no-sp=True"], "--no-sp takes no value, it was given 'True'; use --sp or --no-sp"),
        (["--tp", "9" * 400], f"--tp {'9' * 400} is no whole number"),
        (["--tp", "2", "--tensor-model-parallel-size", "4"], "--tp is given twice, as 2 and as 4; give it once"),
        (["--sp", "--no-sp"], "--sp is given twice, as True and as False; give it once"),
    ],
)
def test_each_mistake_is_one_sentence(words: list[str], problem: str) -> None:
    assert problems_of(*words) == [problem]


def test_all_mistakes_are_found_and_the_rest_is_still_read() -> None:
    given, problems = read_words(["--tpp", "2", "--lr", "fast", "--dp", "3"], FLAGS)
    assert len(problems) == 2
    assert given == {"dp": ["3"]}


def written(folder: Path, text: str, name: str = "run.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_file_has_the_names_of_the_flags_with_dashes_or_underscores(tmp_path: Path) -> None:
    path = written(tmp_path, 'tp = 2\nmin-lr = 1e-4\ndata = ["a", "b"]\nsequence_parallel = true\nshape = "linear"\n')
    given, problems = read_file(path, FLAGS)
    assert problems == []
    expected = Options(Sizes(tp=2, sp=True), Rest(min_lr=1e-4, shape="linear", data=("a", "b")))
    assert build(Options, given, FLAGS, "program") == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tpp = 2", "tpp is no option; the nearest is tp"),
        ('tp = "two"', "tp two is no whole number"),
        ("tp = 2.5", "tp 2.5 is no whole number"),
        ("sp = 1", "sp takes no value, it was given '1'; use sp = true or sp = false"),
        ("[model]\ntp = 2", "[model] is a table; options stand at the top level, as in: tp = 2"),
        ('config = "other.toml"', "config cannot name another file"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(tmp_path: Path, text: str, problem: str) -> None:
    path = written(tmp_path, text)
    assert read_file(path, FLAGS) == ({}, [f"{path}: {problem}"])


def test_a_file_that_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    assert read_file(str(tmp_path / "no.toml"), FLAGS)[1] == [f"--config {tmp_path}/no.toml: there is no such file"]
    assert "is no valid TOML" in read_file(written(tmp_path, "tp = = 2"), FLAGS)[1][0]
    assert "is no valid JSON" in read_file(written(tmp_path, "{", "a.json"), FLAGS)[1][0]
    assert "cannot be read" in read_file(str(tmp_path), FLAGS)[1][0]


def test_saved_options_are_read_again(tmp_path: Path) -> None:
    options = Options(Sizes(tp=2, sp=True), Rest(lr=3e-4, data=("a",), betas=(0.5, 0.25)))
    path = written(tmp_path, json.dumps({"options": values_of(options, FLAGS), "other": 1}), "config.json")
    given, problems = read_file(path, FLAGS)
    assert problems == []
    assert build(Options, given, FLAGS, "program") == options
