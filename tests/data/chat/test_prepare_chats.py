"""From files of chats to rows: what is left out, cut, held out, mixed and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallax.data.chat.options import ChatOptions, check
from parallax.data.chat.prepare import PreparedChats, prepare_chats
from parallax.data.loader import BatchLoader
from parallax.data.packing import RowDataset
from parallax.errors import ConfigError
from tests.data.chat import tokenizers_of_the_test as made

ROOT = Path(__file__).resolve().parents[3]
HEADERS = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
END = list(b"<|im_end|>")


def write(path: Path, pairs: list[tuple[str, str]]) -> str:
    lines = [json.dumps({"prompt": question, "completion": answer}) for question, answer in pairs]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def prepare(*data: str, seq_len: int = 128, **more: Any) -> PreparedChats:
    return prepare_chats(ChatOptions(data, **{"tokenizer": "bytes", "eval_fraction": 0, **more}), seq_len)


def samples_of(dataset: RowDataset) -> list[bytes]:
    """Return the bytes of each document of each row, sorted."""
    found = []
    for i in range(len(dataset)):
        row = dataset[i]
        documents, ids = row["documents"], row["input_ids"]
        found += [bytes(ids[documents == d].tolist()) for d in range(documents[-1] + 1) if ids[documents == d][0] < 256]
    return sorted(found)


def rendered(question: str, answer: str) -> bytes:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n".encode()


def labels_of(dataset: RowDataset) -> list[int]:
    return [int(label) for i in range(len(dataset)) for label in dataset[i]["labels"] if label != -100]


PAIRS = [(f"q{i}", "a" * (i % 5) + f"{i}") for i in range(40)]


@pytest.mark.parametrize("packing", [True, False])
def test_every_chat_is_in_the_rows_once_and_its_answers_are_the_labels(tmp_path: Path, packing: bool) -> None:
    data = prepare(write(tmp_path / "a.jsonl", PAIRS), packing=packing, seq_len=200)
    assert samples_of(data.train) == sorted(rendered(*pair) for pair in PAIRS)
    assert sorted(labels_of(data.train)) == sorted(b for _, answer in PAIRS for b in [*answer.encode(), *END])
    assert len(data.train) == (16 if packing else 40) and data.eval is None
    assert "40 chats; 40 to train on" in data.description and "template chatml" in data.description


def test_a_chat_that_is_too_long_is_dropped_cut_or_an_error_and_counted(tmp_path: Path) -> None:
    """Fault 28: a cut turn keeps what fits, without an invented end; one whose prompt alone fills the row is dropped."""
    path = write(tmp_path / "a.jsonl", [("short", "x"), ("q", "y" * 100), ("z" * 100, "never seen")])
    dropped = prepare(path, seq_len=100, too_long="drop")
    assert samples_of(dropped.train) == [rendered("short", "x")]
    assert "3 chats, 2 too long and dropped; 1 to train on" in dropped.description
    cut = prepare(path, seq_len=100, too_long="truncate")
    assert samples_of(cut.train) == sorted([rendered("short", "x"), rendered("q", "y" * 100)[:100]])
    assert sorted(labels_of(cut.train)) == sorted([*b"x", *END, *b"y" * (100 - HEADERS - 1)])
    assert "3 chats, 1 too long and dropped, 1 cut; 2 to train on" in cut.description
    with pytest.raises(
        ConfigError,
        match=rf"--data {path}, line 2: this chat has 162 tokens, more than --seq-len 100, the first of 2 that",
    ):
        prepare(path, seq_len=100, too_long="error")
    exact = len(rendered("short", "x"))
    assert len(prepare(path, seq_len=exact).train) == 1
    with pytest.raises(
        ConfigError,
        match=r"none of the 3 chats of .*a\.jsonl is left: with --seq-len 40 each is too long \(the shortest has 67",
    ):
        prepare(path, seq_len=40)
    with pytest.raises(ConfigError, match="none of the 3 chats of"):
        prepare(path, seq_len=40, too_long="truncate")


def test_a_bad_chat_is_an_error_with_its_line_or_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q", "completion": "a"}\n{"prompt": 1}\nnot json\n{"prompt": "q", "completion": "b"}\n')
    with pytest.raises(
        ConfigError, match=rf"--data {path}, line 2: found an object .*--skip-bad leaves such chats out"
    ) as caught:
        prepare(str(path))
    assert len(caught.value.problems) == 1
    data = prepare(str(path), skip_bad=True)
    assert samples_of(data.train) == [rendered("q", "a"), rendered("q", "b")]
    assert "2 chats, 2 unusable and left out; 2 to train on" in data.description
    path.write_text("x\n")
    with pytest.raises(
        ConfigError, match=r"holds no chat that can be used: 1 are left out, the first because: .*line 1: this is not"
    ):
        prepare(str(path), skip_bad=True)
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl holds no chat; give one with chats\."):
        prepare(str(path))


def test_what_is_held_out_is_never_trained_on_not_even_its_double(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*PAIRS, *PAIRS[:20], *PAIRS[:5]])
    data = prepare(path, eval_fraction=0.25)
    assert data.eval is not None
    trained, held = samples_of(data.train), samples_of(data.eval)
    assert not set(trained) & set(held) and len(set(held)) == 10
    assert sorted(trained + held) == sorted(rendered(*pair) for pair in [*PAIRS, *PAIRS[:20], *PAIRS[:5]])
    more = prepare(write(tmp_path / "b.jsonl", [*PAIRS, ("another", "one")]), eval_fraction=0.25)
    assert more.eval is not None and len(set(samples_of(more.eval)) ^ set(held)) <= 2, "one more chat moves hardly any"
    with pytest.raises(
        ConfigError, match="too few different chats to hold one out; give more, or use --eval-fraction 0"
    ):
        prepare(write(tmp_path / "c.jsonl", PAIRS[:1] * 3), eval_fraction=0.25)


@pytest.mark.parametrize("weights", [("", ""), ("0.7", "0.3")])
def test_a_chat_and_its_double_in_another_file_are_on_the_same_side(tmp_path: Path, weights: tuple[str, str]) -> None:
    files = [write(tmp_path / "a.jsonl", PAIRS), write(tmp_path / "b.jsonl", PAIRS[:7])]
    words = [word for pair in zip(weights, files, strict=True) for word in pair if word]
    for fraction in (0.01, 0.1, 0.5):
        data = prepare(*words, eval_fraction=fraction, packing=False)
        assert data.eval is not None
        trained, held = set(samples_of(data.train)), set(samples_of(data.eval))
        assert len(held) == max(1, fraction * len(PAIRS)) and not trained & held


def test_a_file_of_one_chat_is_trained_on_whatever_is_held_out(tmp_path: Path) -> None:
    one, many = write(tmp_path / "a.jsonl", [("one", "1")]), write(tmp_path / "b.jsonl", PAIRS)
    data = prepare(one, many, eval_fraction=0.5)
    assert rendered("one", "1") in samples_of(data.train) and data.eval is not None
    with pytest.raises(ConfigError, match="too few different chats to hold one out"):
        prepare(one, write(tmp_path / "c.jsonl", [("two", "2")]), eval_fraction=0.5)


def test_files_with_weights_have_their_shares_of_the_rows_over_any_length(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", PAIRS), write(tmp_path / "b.jsonl", [("b", "1"), ("b", "2"), ("b", "3")])
    plain = prepare(a, b, packing=False)
    assert isinstance(plain.train, RowDataset) and len(plain.train) == 43
    blend = prepare("0.75", a, "0.25", b, packing=False, seq_len=100)
    loader = BatchLoader(blend.train, seed=0, global_batch_size=4, micro_batch_size=4)
    rows = [bytes(row[:20].tolist()) for step in range(40) for row in loader.micro_batches(step)[0]["input_ids"]]
    of_b = [row == rendered("b", "")[:20] for row in rows]
    assert [sum(of_b[i : i + 4]) for i in range(0, 160, 4)] == [1] * 40
    assert blend.train.fingerprint != plain.train.fingerprint
    assert [file.name for file in blend.files] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(ConfigError, match="in a blend a weight stands before each path"):
        prepare("0.5", a, b)
    with pytest.raises(ConfigError, match=r"names .*a\.jsonl more than once"):
        prepare(a, a)


def test_all_files_have_weights_in_their_rows_if_one_needs_them(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", PAIRS)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": messages}))
    data = prepare("1", a, "1", str(tmp_path / "b.jsonl"))
    assert all("weights" in data.train[i] for i in range(len(data.train)))


@pytest.mark.parametrize("loss_per", ["token", "sample"])
def test_weights_are_there_only_where_they_are_needed(tmp_path: Path, loss_per: Any) -> None:
    path = tmp_path / "a.jsonl"
    turns = [
        ("user", "a", None),
        ("assistant", "b", 0.5),
        ("user", "c", None),
        ("assistant", "dd", None),
        ("assistant", "e", 0),
    ]
    messages = [{"role": role, "content": content, "weight": weight} for role, content, weight in turns]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    row = prepare(str(path), loss_per=loss_per, seq_len=300).train[0]
    weights = row["weights"][row["labels"] != -100]
    expected = np.array([0.5] * (1 + len(END)) + [1.0] * (2 + len(END)))
    np.testing.assert_allclose(weights, expected / (expected.sum() if loss_per == "sample" else 1), rtol=1e-6)
    assert row["weights"].dtype == np.float32 and not row["weights"][row["labels"] == -100].any()
    plain = prepare(write(tmp_path / "b.jsonl", PAIRS), loss_per=loss_per)
    assert ("weights" in plain.train[0]) == (loss_per == "sample")
    if loss_per == "sample":
        assert sum(plain.train[i]["weights"].sum() for i in range(len(plain.train))) == pytest.approx(40, rel=1e-5)


def test_what_is_made_is_kept_and_made_anew_when_something_changes(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", PAIRS)

    def stores() -> int:
        return len(list(cache.glob("chats-*/tokens.bin")))

    first = prepare(path)
    assert prepare(path).train.fingerprint == first.train.fingerprint and stores() == 1
    other_rows = [prepare(path, seq_len=100), prepare(path, packing=False), prepare(path, loss_per="sample")]
    assert stores() == 1, "rows are made of the same store"
    other_chats = [prepare(path, train_on="full"), prepare(path, template="plain")]
    assert stores() == 3
    (tmp_path / "copy").mkdir()
    copy = write(tmp_path / "copy" / "a.jsonl", PAIRS)
    assert prepare(copy).train.fingerprint == first.train.fingerprint, "where a file lies is no part of the data"
    write(Path(path), [*PAIRS, ("new", "chat")])
    changed = prepare(path)
    prints = [data.train.fingerprint for data in (first, *other_rows, *other_chats, changed)]
    assert len(set(prints)) == len(prints)
    (newest,) = (p.parent for p in cache.glob("chats-*/record.json") if json.loads(p.read_text())["num_chats"] == 41)
    os.truncate(newest / "weights.bin", 8)
    with pytest.raises(ConfigError, match=rf"{newest} is damaged .*delete that folder"):
        prepare(path)


def test_a_template_that_yields_no_trained_token_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Fault 26."""
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    folder = made.save(made.byte_level(), tmp_path / "silent", silent)
    for skip_bad in (False, True):
        with pytest.raises(
            ConfigError, match=rf"the chat template of {folder} writes nothing of what the assistant says"
        ):
            prepare(write(tmp_path / "a.jsonl", PAIRS), tokenizer=folder, skip_bad=skip_bad)


def test_a_hugging_face_folder_trains_what_its_template_writes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = made.save(made.byte_level(), tmp_path / "model", made.CHATML)
    data = prepare(write(tmp_path / "a.jsonl", PAIRS), tokenizer=folder, seq_len=64)
    (tmp_path / "out").mkdir()
    data.tokenizer.save(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = [
        theirs.apply_chat_template([{"role": "user", "content": q}, {"role": "assistant", "content": a}])["input_ids"]
        for q, a in PAIRS
    ]
    found = []
    for i in range(len(data.train)):
        row = data.train[i]
        used = range(len(data.train.rows.members[data.train.rows.starts[i] : data.train.rows.starts[i + 1]]))
        found += [row["input_ids"][row["documents"] == d].tolist() for d in used]
    assert sorted(found) == sorted(expected)


def test_every_mistake_in_the_options_is_told_at_once_without_torch(tmp_path: Path) -> None:
    options = ChatOptions((str(tmp_path / "absent"),), "nothing", "unknown", eval_fraction=3)
    problems = check(options)
    assert len(problems) == 4 and all(problem.startswith("--") and problem.endswith(".") for problem in problems)
    with pytest.raises(ConfigError, match="--eval-fraction 3"):
        prepare_chats(options, 8)
    program = (
        "import sys; from parallax.data.chat.options import ChatOptions, check; "
        "from parallax.data.chat.prepare import prepare_chats; prepare_chats(ChatOptions((sys.argv[1],), 'bytes'), 128); "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", program, write(tmp_path / "a.jsonl", PAIRS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False False", run.stderr


def test_ranks_that_start_together_encode_once_and_agree(tmp_path: Path) -> None:
    program = (
        "import sys; from parallax.data.chat.options import ChatOptions; from parallax.data.chat.prepare import prepare_chats; "
        "print(prepare_chats(ChatOptions((sys.argv[1],), 'bytes'), 128).train.fingerprint)"
    )
    command = [sys.executable, "-c", program, write(tmp_path / "a.jsonl", PAIRS)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    outputs = [rank.communicate(timeout=60) for rank in [subprocess.Popen(command, **pipes) for _ in range(4)]]
    assert len({out for out, _ in outputs}) == 1 and len(outputs[0][0].strip()) == 32
    assert sum("preparing the chats" in err for _, err in outputs) == 1
