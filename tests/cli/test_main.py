"""`parallax` itself: what it says of a word that it does not know."""

from __future__ import annotations

import pytest

from parallax.cli.main import main


def _said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(words)
    out, error = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate model --promt x", "--promt is no option of parallax generate; the nearest is --prompt"),
        ("generate model --promt=x", "--promt is no option of parallax generate; the nearest is --prompt"),
        (
            "schedule show dualpipe --stagess 3",
            "--stagess is no option of parallax schedule show; the nearest is --stages",
        ),
        ("checkpoint verify run --zzz", "--zzz is no option of parallax checkpoint verify; --help lists all options"),
        ("generate model extra", "extra stands alone; a text to continue is given as --prompt TEXT, in quotes"),
        ("data", "the following arguments are required: COMMAND; see parallax data --help"),
    ],
)
def test_a_word_that_is_unknown_is_answered_with_the_nearest_in_one_sentence(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _said(words.split(), capsys) == (2, "", f"parallax: error: {says}\n")


def test_no_word_at_all_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, error = _said([], capsys)
    assert (status, error) == (0, "")
    assert all(group in out for group in ("schedule", "checkpoint", "data", "generate"))
