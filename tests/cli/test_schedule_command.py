"""`parallax schedule`: what it prints and writes, and how it says what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.cli.main import main
from parallax.pipeline import Costs, make_schedule, simulate
from parallax.pipeline.tables import read_csv
from parallax.pipeline.trace import write_trace
from tests.pipeline.test_trace import recorded

RECORDS = json.loads((Path(__file__).parents[1] / "oracles" / "schedules.json").read_text())["records"]
NAMES = {"zb_h1": "zb-h1", "zb_v": "zb-v", "dualpipe_v": "dualpipev"}


def run(capsys: pytest.CaptureFixture, line: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command line."""
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_simulate_prints_the_recorded_numbers_as_json(capsys: pytest.CaptureFixture) -> None:
    for record in RECORDS[::9]:
        name, _, chunks = record["schedule"].partition("_v")
        chunked = f"{name} --chunks {chunks}" if chunks.isdigit() else NAMES.get(record["schedule"], record["schedule"])
        costs = f"F={record['F']},I={record['I']},W={record['W']},FB={record['FB']}"
        sizes = f"--stages {record['P']} --micro-batches {record['M']}"
        status, out, err = run(capsys, f"schedule simulate {chunked} {sizes} --cost {costs} --json")
        assert (status, err) == (0, "")
        numbers = json.loads(out)
        assert numbers["makespan"] == record["makespan"]
        assert numbers["bubble"] == max(record["bubble_per_rank"])
        assert numbers["bubble_per_rank"] == record["bubble_per_rank"]
        assert numbers["peak_in_flight"] == record["peak_inflight"]


def test_simulate_prints_a_line_for_each_rank(capsys: pytest.CaptureFixture) -> None:
    _, out, _ = run(capsys, "schedule simulate 1f1b --stages 2 --micro-batches 4")
    assert "makespan 15, bubble 3 (20.0%)" in out
    assert [line.split() for line in out.splitlines()[-2:]] == [
        ["0", "12", "3", "20.0%", "2"],
        ["1", "12", "3", "20.0%", "1"],
    ]


def test_compare_takes_the_same_model_on_the_same_ranks(capsys: pytest.CaptureFixture) -> None:
    _, out, _ = run(capsys, "schedule compare --stages 8 --micro-batches 32 --cost F=1,I=1,W=1,FB=2.5 --json")
    makespans = [(result["schedule"], result["stages"] // 8, result["makespan"]) for result in json.loads(out)]
    assert makespans == [
        ("interleaved-paired", 4, 88.375),
        ("dualpipe", 1, 89),
        ("dualpipev", 2, 89.5),
        ("interleaved-paired", 2, 92.75),
        ("zb-v", 2, 99.5),
        ("interleaved", 4, 101.25),
        ("interleaved-paired", 1, 101.5),
        ("zb-h1", 1, 103),
        ("interleaved", 2, 106.5),
        ("1f1b", 1, 117),
        ("1f1b-eager", 1, 117),
        ("gpipe", 1, 117),
    ]
    weights = {result["schedule"]: result["weights"] for result in json.loads(out)}
    assert weights.pop("dualpipe") == 2 and set(weights.values()) == {1}


def test_compare_says_which_schedules_do_not_fit(capsys: pytest.CaptureFixture) -> None:
    status, out, err = run(capsys, "schedule compare --stages 3 --micro-batches 5 --cost F=1,I=1,W=1,comm=0.1")
    assert (status, err) == (0, "")
    assert "left out: schedule dualpipe needs an even number of ranks" in out and "zb-v" in out


def test_simulate_prints_bytes_and_takes_costs_of_each_stage_and_links_with_a_bandwidth(
    capsys: pytest.CaptureFixture,
) -> None:
    sizes = "--stages 4 --micro-batches 8"
    costs = "F=1:1:1:2,I=1,W=1:1:1:3,comm=0.25,bytes=1e6,bandwidth=4e6"
    memory = "activations=10:10:10:20,stage=100,kept=1"
    _, out, _ = run(capsys, f"schedule simulate 1f1b {sizes} --cost {costs} --memory {memory} --json")
    given = Costs((1, 1, 1, 2), 1, (1, 1, 1, 3), latency=0.25, message_bytes=1e6, bandwidth=4e6)
    expected = simulate(make_schedule("1f1b", 4, 8), given)
    numbers = json.loads(out)
    assert (numbers["makespan"], numbers["peak_bytes"]) == (expected.makespan, [140, 130, 120, 120])
    _, out, _ = run(capsys, f"schedule simulate 1f1b {sizes} --memory {memory}")
    assert out.splitlines()[-4].split()[-2:] == ["4", "140"]
    _, out, _ = run(capsys, f"schedule compare {sizes} --memory activations=1,stage=4 --json")
    assert {result["schedule"]: result["bytes"] for result in json.loads(out)}["dualpipe"] == 13


def test_auto_says_what_it_chose_and_why(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    line = "--stages 8 --micro-batches 32 --cost F=1,I=1,W=1,FB=2.5 --memory activations=1,stage=4 --limit 13"
    _, out, _ = run(capsys, f"schedule simulate auto {line} --json")
    numbers = json.loads(out)
    assert (numbers["schedule"], numbers["chunks"], numbers["makespan"]) == ("dualpipev", None, 89.5)
    assert "the fastest of the 4 of 12 that fit in memory" in numbers["why"]
    _, out, _ = run(capsys, f"schedule show auto {line}")
    assert out.startswith("auto chose dualpipev: a step takes 89.5") and "rank 7" in out
    _, out, err = run(capsys, f"schedule show auto {line} --csv {tmp_path / 'chosen.csv'}")
    assert "auto chose dualpipev" in err and out == f"{tmp_path / 'chosen.csv'}\n"
    assert read_csv(tmp_path / "chosen.csv").order == make_schedule("dualpipev", 8, 32).order


def test_a_recorded_step_is_drawn_beside_its_simulation(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    schedule = make_schedule("dualpipe", 4, 8)
    write_trace(recorded(schedule, Costs(latency=0.5)), tmp_path / "step.json")
    _, out, _ = run(capsys, f"schedule show {tmp_path / 'step.json'}")
    assert "dualpipe, recorded: 4 ranks, time " in out and "dualpipe, simulated with the times measured: " in out
    assert out.count("rank 3 ") == 2 and "time 26, bubble 7.7%" in out
    _, out, _ = run(capsys, f"schedule show {tmp_path / 'step.json'} --cost comm=0.5")
    assert out.count(f"time {simulate(schedule, Costs(latency=0.5)).makespan:g}") == 2
    files = {flag: tmp_path / f"step.{flag}" for flag in ("html", "csv", "perfetto")}
    flags = " ".join(f"--{flag} {path}" for flag, path in files.items())
    status, out, _ = run(capsys, f"schedule show {tmp_path / 'step.json'} {flags}")
    assert status == 0 and set(out.split()) == set(map(str, files.values()))
    assert files["html"].read_text().count("<svg") == 2 and read_csv(files["csv"]).order == schedule.order
    assert json.loads(files["perfetto"].read_text())["traceEvents"]


def test_a_recorded_step_gives_the_costs_for_a_choice_and_for_others(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "step.json"
    write_trace(recorded(make_schedule("zb-v", 4, 8), Costs(0.5, 0.5, 0.5, latency=0.25)), path)
    line = f"--stages 8 --micro-batches 32 --cost {path}"
    _, out, _ = run(capsys, f"schedule compare {line} --json")
    _, given, _ = run(capsys, "schedule compare --stages 8 --micro-batches 32 --cost F=1,I=1,W=1,comm=0.25 --json")
    assert json.loads(out) == json.loads(given)
    _, out, _ = run(capsys, f"schedule simulate auto {line} --json")
    assert json.loads(out)["makespan"] == json.loads(given)[0]["makespan"]
    _, out, _ = run(capsys, f"schedule simulate zb-v {line} --json")
    expected = simulate(make_schedule("zb-v", 8, 32), Costs(0.5, 0.5, 0.5, latency=0.25)).makespan
    assert json.loads(out)["makespan"] == expected


def test_show_draws_a_row_for_each_rank(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "schedule show 1f1b --stages 3 --micro-batches 4")
    assert "rank 0 F0 F1 F2 ············B0    F3 B1    ···B2    ···B3    " in out
    assert "rank 2 ······F0 B0    F1 B1    F2 B2    F3 B3    ············  33.3%         1" in out


def test_show_writes_files_and_reads_its_own_table_back(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    table, page = tmp_path / "mine.csv", tmp_path / "mine.html"
    status, out, _ = run(capsys, f"schedule show dualpipe --stages 4 --micro-batches 8 --csv {table} --html {page}")
    assert status == 0 and out.split() == [str(page), str(table)]
    assert read_csv(table).order == make_schedule("dualpipe", 4, 8).order
    assert page.read_text().startswith("<!doctype html>")
    status, out, _ = run(capsys, f"schedule simulate {table} --json")
    assert json.loads(out)["makespan"] == 26


def test_pictures_need_matplotlib_and_say_so(
    capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    files = f"--png {tmp_path / 'x.png'} --csv {tmp_path / 'x.csv'}"
    status, _, err = run(capsys, f"schedule show gpipe --stages 2 --micro-batches 2 {files}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]  # what can be written is
    assert status == 2 and "matplotlib is not installed; pip install matplotlib, or use --html" in err


def test_pictures_are_drawn_by_matplotlib(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra plot")
    png, svg = tmp_path / "x.png", tmp_path / "x.svg"
    status, _, err = run(capsys, f"schedule show dualpipe --stages 2 --micro-batches 4 --png {png} --svg {svg}")
    assert status == 0, err
    assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("schedule show zb-h2 --stages 2 --micro-batches 2", "schedule zb-h2 is unknown; use gpipe, 1f1b, "),
        ("schedule show gpipe --stages 2", "schedule gpipe needs its sizes; give --stages and --micro-batches"),
        ("schedule show gpipe --stages 0 --micro-batches 2", "argument --stages: 0 must be a whole number from 1"),
        ("schedule show dualpipe --stages 3 --micro-batches 8", "use 2 or 4, or dualpipev"),
        ("schedule show zb-v --stages 2 --micro-batches 8 --chunks 2", "leave out --chunks"),
        ("schedule show none.csv", "schedule none.csv cannot be read: No such file or directory"),
        ("schedule show gpipe --stages 2 --micro-batches 2 --html none/x.html", "there is no folder none"),
        (
            "schedule show gpipe --stages 2 --micro-batches 2 --stage 3",
            "--stage is no option of parallax schedule show; the nearest is --stages",
        ),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost X=1", "'X=1' is no cost; write F=1, I=1"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=-1", "'F=-1' is no cost"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=nan", "'F=nan' is no cost"),
        ("schedule show gpipe --stages 2 --micro-batches 2 --cost F=1e308", "must be 0 or from 1e-30 to 1e+30"),
        ("schedule show gpipe --stages 2 --micro-batches 2 --cost bandwidth=1e-300,bytes=1", "use another unit"),
        ("schedule show none.json --cost F=2", "none.json brings its own times; of --cost only comm"),
        ("schedule show none.json --memory activations=1", "neither --memory nor --limit"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=0,I=0,W=0", "cannot all be 0"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost FB=4", "FB=4 must be from 2, the longer"),
        (
            "schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=1:2:3",
            "F is given for 3 stages and there are 2",
        ),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=1:2,I=1:2:3", "for 2 and for 3 stages"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=1:2,FB=3", "FB needs a number for each stage"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=1:2,FB=3:6", "FB=6 of stage 1 must be from 2"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost comm=1:2", "comm is one number"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost bytes=1", "are given together"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost bytes=1,bandwidth=0", "lets no message through"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --cost F=1,F=2", "F is given twice"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --memory stage=1", "activations=... is needed"),
        ("schedule simulate gpipe --stages 2 --micro-batches 2 --limit 3", "--limit is for auto, and needs --memory"),
        ("schedule simulate auto --stages 2 --micro-batches 4 --limit nan", "nan must be a number of bytes"),
        ("schedule simulate auto --stages 2 --micro-batches 4 --chunks 2", "--chunks is chosen by auto too"),
        ("schedule simulate auto", "schedule auto needs its sizes"),
        ("schedule show gpipe --stages 2 --micro-batches 2 --perfetto x", "--perfetto is for a recorded step"),
        ("schedule compare --stages 2 --micro-batches 2 --cost none.json", "trace none.json cannot be read"),
        ("schedule show none.json", "trace none.json cannot be read: No such file or directory"),
        ("schedule show none.json --stages 2", "--stages 2 contradicts none.json"),
        ("schedule compare --stages 2", "the following arguments are required: --micro-batches"),
        ("schedule", "the following arguments are required: COMMAND"),
        ("pipeline", "invalid choice: 'pipeline'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(capsys: pytest.CaptureFixture, line: str, sentence: str) -> None:
    status, out, err = run(capsys, line)
    assert (status, out) == (2, "")
    assert err.startswith("parallax: error: ") and err.count("\n") == 1 and sentence in err


def test_a_broken_table_is_refused_with_rank_position_and_action(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1B0,1F0\n")
    status, _, err = run(capsys, f"schedule show {tmp_path / 'mine.csv'}")
    assert (
        status == 2 and "rank 1, position 0 (mine.csv, line 2, column 1), 1B0: it needs 1F0, which comes later" in err
    )
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    status, _, err = run(capsys, f"schedule simulate {tmp_path / 'mine.csv'} --stages 3")
    assert status == 2 and "--stages 3 contradicts" in err


def test_the_command_is_installed_and_its_help_needs_no_torch() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'parallax = "parallax.cli.main:main"' in text
    program = (
        "import sys; from parallax.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    for words in (
        ["--help"],
        ["schedule", "show", "--help"],
        ["schedule", "show", "zb-v", "--stages", "2", "--micro-batches", "4"],
    ):
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stderr
    assert "rank 1" in done.stdout


def test_ctrl_c_ends_a_command_with_status_130_and_no_traceback(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parallax.cli.schedule.check_schedule", interrupted)
    assert run(capsys, "schedule simulate gpipe --stages 2 --micro-batches 2") == (130, "", "")


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = [
        sys.executable,
        "-m",
        "parallax.cli.main",
        "schedule",
        "show",
        "gpipe",
        "--stages",
        "64",
        "--micro-batches",
        "64",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
