"""The charts: boxes where the simulation has them, every action once, and what a page or a terminal shows of them."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from parallax.pipeline import ALL_SCHEDULES, Costs, forward_only, make_schedule, simulate
from parallax.pipeline.draw import Chart, chart_of, color_of, is_dark
from parallax.pipeline.draw.page import to_html
from parallax.pipeline.draw.terminal import to_text


def chart(name: str, ranks: int = 4, micro_batches: int = 8, costs: Costs | None = None) -> Chart:
    schedule = make_schedule(name, ranks, micro_batches)
    return chart_of(schedule, simulate(schedule, costs))


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_chart_holds_what_the_simulation_says(name: str) -> None:
    schedule = make_schedule(name, 4, 12)
    played = simulate(schedule, Costs(1, 1.25, 0.75, latency=0.1, pair=2.5))
    drawn = chart_of(schedule, played)
    assert drawn.most_in_flight == played.peak_in_flight
    for rank, row in enumerate(drawn.rows):
        assert [action for block in row for action in block.parts] == list(schedule.actions_of(rank))
        assert drawn.idle(rank) * drawn.end == pytest.approx(played.bubble[rank])
        assert all(before.end <= after.start for before, after in pairwise(row))
        assert drawn.in_flight[rank][-1][1] == 0
    assert drawn.num_tones == (1 if name in ("gpipe", "1f1b", "1f1b-eager", "zb-h1") else 2)


def test_the_directions_of_dualpipe_have_different_tones() -> None:
    drawn = chart("dualpipe")
    assert {
        (part.pipe, tone) for row in drawn.rows for box in row for part, tone in zip(box.parts, box.tones, strict=True)
    } == {
        (0, 0),
        (1, 1),
    }
    assert (
        color_of("F", 0, 2) != color_of("F", 1, 2) and is_dark(color_of("F", 0, 2)) and not is_dark(color_of("F", 1, 2))
    )


def test_forwards_alone_are_drawn_without_being_kept() -> None:
    schedule = forward_only(2, 3)
    assert chart_of(schedule, simulate(schedule)).most_in_flight == (1, 1)


@pytest.mark.parametrize("colored", [True, False])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_the_terminal_shows_a_row_for_each_rank_within_its_width(name: str, colored: bool) -> None:
    for width in (60, 100, 400):
        lines = to_text(chart(name), width, colored).plain.splitlines()
        rows = [line for line in lines if line.startswith("rank ")]
        assert len(rows) == 4 and len({len(row) for row in rows}) == 1 and len(rows[0]) <= width


def test_a_box_is_as_wide_as_its_time_and_bubbles_are_seen() -> None:
    lines = to_text(chart("gpipe", 2, 2), width=80, colored=False).plain.splitlines()
    rows = [line[len("rank 0 ") : line.index("%")].rsplit(" ", 1)[0] for line in lines if line.startswith("rank ")]
    assert [row.rstrip() for row in rows] == [
        "F0  F1  ············B0      B1",
        "····F0  F1  B0      B1      ········",
    ]


def test_a_long_schedule_is_drawn_with_a_letter_a_box() -> None:
    lines = to_text(chart("dualpipe", 8, 64), width=80, colored=False).plain.splitlines()
    assert max(map(len, lines[2:11])) <= 80


def test_the_page_holds_every_action_once_with_its_words_and_needs_nothing_else() -> None:
    drawn = chart("dualpipe")
    page = to_html([drawn])
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    actions = [str(action) for row in drawn.rows for block in row for action in block.parts]
    assert sorted(re.findall(r"^(?:<g.*\n)?(b?\d+[FBIW]\d+): ", page, re.MULTILINE)) == sorted(actions)
    assert "0F3: forward of micro-batch 3, stage 0\ntogether with\nb3B5: backward of micro-batch 5, stage 3" in page
    assert page.count('<polyline points="') == 4
    assert not re.findall(r"(?:src|href)=|url\(|@import", page)


def test_a_name_is_no_markup() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    named = chart_of(schedule, simulate(schedule))
    hostile = Chart("<script>alert(1)</script>", named.rows, named.in_flight, named.end, named.num_tones)
    assert "<script>alert" not in to_html([hostile])


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra plot")
    from parallax.pipeline.draw.figure import save_figure

    schedule = make_schedule("gpipe", 2, 2)
    save_figure([chart_of(schedule, simulate(schedule), r"$\frac{ $x")], tmp_path / "x.svg", "svg")
    assert (tmp_path / "x.svg").stat().st_size > 1000
