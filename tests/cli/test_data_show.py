"""`parallax data show`: tokens, what is learned of them, and what is wrong with chats."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from parallax.checkpoint.parts import CheckpointParts
from parallax.checkpoint.save import save
from parallax.cli import data_show
from parallax.config import FinetuneOptions
from parallax.data.chat.encoder import load_chat_encoder
from parallax.data.chat.options import ChatOptions
from parallax.data.chat.prepare import prepare_chats
from parallax.errors import ConfigError
from parallax.models.config import DecoderConfig
from parallax.models.decoder import DecoderStage
from parallax.resolve import read_options, resolve
from parallax.tensor_parallel.facts import named_parameters_with_facts
from tests.data.chat import tokenizers_of_the_test as made

CHATS = [
    [("system", "be kind"), ("user", "hi"), ("assistant", "hello\n  é"), ("user", "bye"), ("assistant", "")],
    [("user", "q"), ("assistant", "a\u202eb")],
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    records = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in CHATS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def show(*words: str) -> int:
    parser = argparse.ArgumentParser()
    data_show.add_parser(parser.add_subparsers())
    options = parser.parse_args(["show", *words])
    status: int = options.run(options)
    return status


def test_json_has_a_line_per_chat_with_ids_and_half_open_trained_ranges(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tokenizer = made.byte_level()
    assert show(chats, "--tokenizer", made.save(tokenizer, tmp_path / "model", made.CHATML), "--json") == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert err == "" and len(lines) == 2
    for line, chat in zip(lines, CHATS, strict=True):
        assert set(line) == {"input_ids", "trained"}
        messages = [{"role": role, "content": content} for role, content in chat]
        assert line["input_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
        texts = [tokenizer.decode(line["input_ids"][start:stop]) for start, stop in line["trained"]]
        assert texts == [content + "<|im_end|>" for role, content in chat if role == "assistant"]


def test_tokens_are_shown_with_marks_and_counts_and_nothing_that_a_terminal_obeys(
    chats: str, capsys: pytest.CaptureFixture
) -> None:
    assert show(chats, "--tokenizer", "bytes", "--template", "plain") == 0
    out = capsys.readouterr().out
    assert f"{chats}, line 1: " in out and out.count("«") == out.count("»") == 3
    assert "«a·<0xE2>·<0x80>·<0xAE>·b·<|endoftext|>»" in out
    assert out.splitlines()[-1].startswith("2 chats, ") and out.splitlines()[-1].endswith("; template plain")
    assert all(c.isprintable() or c == "\n" for c in out)


def test_learned_tokens_are_coloured_where_colours_are_wanted(
    chats: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(chats, "--tokenizer", "bytes", "--limit", "1", "--train-on", "last")
    assert capsys.readouterr().out.count(data_show.GREEN) == len("<|im_end|>")
    monkeypatch.setenv("NO_COLOR", "1")
    show(chats, "--tokenizer", "bytes", "--limit", "1")
    assert "\x1b" not in capsys.readouterr().out


def test_the_limit_ends_the_reading(chats: str, capsys: pytest.CaptureFixture) -> None:
    with open(chats, "a") as stream:
        stream.write("broken\n")
    show(chats, "--tokenizer", "bytes", "--json", "--limit", "2")
    assert len(capsys.readouterr().out.splitlines()) == 2
    show(chats, "--tokenizer", "bytes", "--json", "--limit", "0")
    assert capsys.readouterr().out == ""


def test_a_bad_chat_is_one_sentence_or_left_out_and_told(chats: str, capsys: pytest.CaptureFixture) -> None:
    with open(chats, "a") as stream:
        stream.write('broken\n{"prompt": "q", "completion": "z"}\n')
    with pytest.raises(ConfigError, match=rf"^{chats}, line 3: this is not valid JSON") as caught:
        show(chats, "--tokenizer", "bytes", "--json")
    assert len(caught.value.problems) == 1
    capsys.readouterr()
    assert show(chats, "--tokenizer", "bytes", "--json", "--skip-bad") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and err.startswith(f"left out: {chats}, line 3: ") and err.count("\n") == 1


def test_no_chat_at_all_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl holds no chat; give one with chats\.$"):
        show(str(path), "--tokenizer", "bytes")
    path.write_text("[]\n")
    with pytest.raises(ConfigError, match=r"1 are left out, the first because: .*line 1: found a list"):
        show(str(path), "--tokenizer", "bytes", "--skip-bad")


def test_without_a_file_the_embedded_chats_are_shown(capsys: pytest.CaptureFixture) -> None:
    assert show("--tokenizer", "bytes", "--limit", "3") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 chats, ")


def test_a_tokenizer_without_a_template_is_shown_in_chatml_with_a_notice(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = made.save(made.byte_level(), tmp_path / "model", None)
    assert show(chats, "--tokenizer", folder, "--json") == 0
    out, err = capsys.readouterr()
    assert err == "the tokenizer brings no chat template, so it is chatml; --template names another\n"
    show(chats, "--tokenizer", folder, "--json", "--template", "chatml")
    assert capsys.readouterr() == (out, "")
    trained = prepare_chats(ChatOptions((chats,), folder, eval_fraction=0), seq_len=256)
    ids = [line["input_ids"] for line in map(json.loads, out.splitlines())]
    assert trained.train[0]["input_ids"].tolist()[: len(ids[0])] == ids[0]
    assert "; template chatml, since the tokenizer brings none; " in trained.description


def test_a_run_and_a_checkpoint_are_named_for_the_tokenizer_and_template_in_them(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from tests.checkpoint.runs import single_process_mesh

    config = DecoderConfig(
        vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ).resolved()
    model = DecoderStage(config)
    run = tmp_path / "run"
    for step, (tokenizer, template) in enumerate((("bytes", "plain"), ("bytes", "llama3"))):
        opened, _ = load_chat_encoder(tokenizer, template)
        parts = CheckpointParts(config, list(named_parameters_with_facts(model)), tokenizer=opened)
        save(run / "checkpoints", step, parts, single_process_mesh())
    for named, template in (
        (run, "llama3"),
        (run / "checkpoints", "llama3"),
        (run / "checkpoints" / "step-00000000", "plain"),
        (run / "checkpoints" / "step-00000000" / "model", "plain"),
    ):
        assert show(chats, "--tokenizer", str(named), "--json") == 0
        out, err = capsys.readouterr()
        show(chats, "--tokenizer", "bytes", "--template", template, "--json")
        assert (out, err) == (capsys.readouterr().out, "")
        options, _ = read_options(["--tokenizer", str(named), "--init", "none"], FinetuneOptions)
        assert Path(resolve(options, 1).data.tokenizer or "").name == "model"
    for folder in (run / "checkpoints").iterdir():
        (folder / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"--tokenizer .*run: .*checkpoints holds no complete checkpoint"):
        show(chats, "--tokenizer", str(run))
