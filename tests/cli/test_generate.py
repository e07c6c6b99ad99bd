"""`parallax generate`: its text is transformers', from a model folder, a checkpoint and a run; bad input is one sentence."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.cli.main import main
from parallax.cli.text_stream import stream_text

transformers = pytest.importorskip("transformers", reason="transformers is the reference; install the test extra")
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes, as transformers saves it, with a tokenizer that puts a begin-of-text before every text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    from parallax.data.tokenizers import ByteTokenizer

    path = tmp_path_factory.mktemp("model")
    names = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    fast = Tokenizer.from_str(ByteTokenizer().files()["tokenizer.json"].decode())
    assert isinstance(fast.model, models.BPE) and fast.get_vocab_size() == 257
    fast.add_special_tokens(names)
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 257)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<|begin|>", eos_token="<|endoftext|>", additional_special_tokens=names[1:]
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=256,
        bos_token_id=257,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, words)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def expected_text(folder: Path, ids: Any, count: int) -> str:
    """Return the new text of greedy generation by transformers, up to an end of text or of a turn; ids: `[1, seq]`."""
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = model.generate(
        ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids), eos_token_id=[256, 259]
    )
    text: str = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def test_the_text_is_that_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]
    assert ids[0, 0] == 257
    status, out, err = run(capsys, folder, "--prompt", PROMPT, "--max-tokens", 40)
    assert status == 0 and out == expected_text(folder, ids, 40) + "\n"
    assert "15 tokens read, 40 generated" in err and "cut at --max-tokens 40" in err


def test_a_seed_gives_the_same_text_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (folder, "--prompt", PROMPT, "--max-tokens", 30, "--temperature", 1.2, "--top-p", 0.9, "--top-k", 50)
    texts = [run(capsys, *words, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_is_written_as_its_template_says(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])  # with its begin-of-text
    status, out, err = run(
        capsys, folder, "--chat", "--system", "Be brief.", "--prompt", "Hi", "--template", "chatml", "--max-tokens", 40
    )
    assert status == 0 and out == expected_text(folder, ids, 40) + "\n" and f"{ids.shape[1]} tokens read" in err
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for record in (messages, {"messages": messages}):
        (tmp_path / "chat.json").write_text(json.dumps(record))
        words = ("--messages", tmp_path / "chat.json", "--template", "chatml", "--max-tokens", 40)
        assert run(capsys, folder, *words)[1] == out
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\n"))
    words = ("--chat", "--system", "Be brief.", "--template", "chatml", "--max-tokens", 40)
    assert run(capsys, folder, *words)[1] == out


def test_a_model_without_a_template_chats_in_chatml_with_a_notice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (folder, "--chat", "--prompt", "Hi", "--max-tokens", 20)
    status, out, err = run(capsys, *words)
    assert status == 0 and err.startswith(
        "the tokenizer brings no chat template, so it is chatml; --template names another\n"
    )
    _, asked_for, quiet = run(capsys, *words, "--template", "chatml")
    assert asked_for == out and "template" not in quiet


def test_a_turn_ends_with_the_templates_end_of_turn(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [*b"Hello.", 259, 65, 65]
    scripted = iter(said)
    monkeypatch.setattr("parallax.models.generate.choose", lambda *_: next(scripted))
    _, out, err = run(capsys, folder, "--chat", "--prompt", "Hi", "--template", "chatml", "--max-tokens", 9)
    assert out == "Hello.\n" and "7 generated" in err and "ended by <|im_end|>" in err


def test_a_checkpoint_and_a_run_are_models_too(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from parallax.checkpoint.open_model import open_model
    from parallax.checkpoint.parts import CheckpointParts
    from parallax.checkpoint.save import save
    from parallax.data.tokenizers import load_tokenizer
    from parallax.tensor_parallel.facts import named_parameters_with_facts
    from tests.checkpoint.runs import single_process_mesh

    expected = run(capsys, folder, "--prompt", PROMPT, "--max-tokens", 20)[1]
    model = open_model(folder)
    parts = CheckpointParts(model.config, list(named_parameters_with_facts(model)), tokenizer=load_tokenizer(folder))
    checkpoint = save(tmp_path / "run" / "checkpoints", 7, parts, single_process_mesh())
    (tmp_path / "run" / "config.json").write_text('{"options": {}}')  # the run's, which is no model
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", checkpoint, checkpoint / "model"):
        assert run(capsys, path, "--prompt", PROMPT, "--max-tokens", 20)[:2] == (0, expected)
    (checkpoint / "model" / "config.json").unlink()
    assert "holds no complete checkpoint" in run(capsys, tmp_path / "run", "--prompt", PROMPT)[2]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "holds no checkpoint yet" in run(capsys, tmp_path / "run", "--prompt", PROMPT)[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to continue: give --prompt TEXT, --messages FILE, or --chat"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0 must be a number from 0"),
        (["--prompt", "a", "--temperature", "warm"], "argument --temperature: invalid float value: 'warm'"),
        (["--prompt", "a", "--top-p", "0.5"], "needs a --temperature above 0"),
        (["--prompt", "a", "--system", "b"], "--system is of a chat; give --chat too"),
        (["--prompt", "a", "--template", "chatml"], "--template is of a chat"),
        (["--prompt", "a", "--messages", "x.json"], "--messages is a whole chat; leave out --prompt"),
        (["--prompt", "\udcff"], "--prompt is no valid text"),
        (["--prompt", "a" * 300], "leaves no room in the model's 256; shorten it"),
        (["--messages", "{tmp}/none.json"], "none.json cannot be read: No such file or directory"),
        (["--messages", "{tmp}/empty.json"], "must hold a list of messages"),
        (["--messages", "{tmp}/deep.json"], "nested too deeply"),
        (["--messages", "{tmp}/broken.json"], "is no valid JSON"),
        (
            ["--messages", "{tmp}/role.json", "--template", "chatml"],
            "the chat cannot be answered: message 1 has the role 'me'",
        ),
        (["--chat", "--prompt", "a", "--template", "none.jinja"], "there is no such template"),
        (["--prompt", "a", "--tokenizer", "{tmp}/none"], "there is no such file or folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    words: list[str], said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.json").write_text('{"messages": []}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "broken.json").write_text("[{]")
    (tmp_path / "role.json").write_text('[{"role": "me", "content": "x"}]')
    status, out, err = run(capsys, folder, *(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((), "there is no folder"),
        (("model/",), "holds neither a checkpoint nor config.json"),
        (("model/checkpoints/",), "holds neither a checkpoint nor config.json"),
        (("model/checkpoints/step-00000007/",), "holds no complete checkpoint"),
        (("model/manifest.json",), "is damaged"),
        (("model/config.json",), "config.json cannot be read as JSON"),
    ],
)
def test_a_folder_without_a_model_is_refused(
    made: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in made:
        path = tmp_path / name
        path.mkdir(parents=True) if name.endswith("/") else (path.parent.mkdir(), path.write_text(""))
    status, _, err = run(capsys, tmp_path / "model", "--prompt", "a", "--tokenizer", "bytes")
    assert status == 2 and said in err and err.count("\n") == 1


def decode_bytes(ids: Any) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.text(max_size=5), st.sampled_from([(), ((256,),), ((1, 2, 3), (256,))]), st.booleans())
def test_streamed_text_is_the_text(text: str, before: str, stops: tuple[tuple[int, ...], ...], ends: bool) -> None:
    ids = [*text.encode(), *(stops[0] if stops and ends else ())]
    if any(tuple(ids[i : i + len(stop)]) == stop for stop in stops for i in range(len(text.encode()))):
        return  # the text happens to hold a stop
    pieces = list(stream_text(iter(ids), [*before.encode()], stops, decode_bytes))
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) >= len(text) - 3  # and not all of it at the end


def test_bytes_that_are_no_text_are_shown_at_last() -> None:
    ids = [65, *[0xF0, 0x9F] * 20, 66]
    assert "".join(stream_text(iter(ids), [], [], decode_bytes)).endswith("B")


def test_a_space_behind_a_special_token_is_shown() -> None:
    """Decoders of sentencepiece-like tokenizers leave out the space of a text that nothing is in front of."""
    from tests.data.chat.tokenizers_of_the_test import llama2_like

    tokenizer = llama2_like()
    hello, end = tokenizer.convert_tokens_to_ids(["\u2581hello", "</s>"])
    ids = [hello, end, hello, end, end, hello]
    text = "".join(stream_text(iter(ids), [hello], [], lambda some: tokenizer.decode(some, skip_special_tokens=True)))
    assert text == " hello hello hello"


def test_a_prompt_without_its_option_is_told_where_it_belongs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, folder, "hello", "there")
    assert status == 2 and "hello there stands alone; a text to continue is given as --prompt TEXT" in err
    assert err.count("\n") == 1
    assert "1 token read, 1 generated" in run(capsys, folder, "--prompt", "", "--max-tokens", 1)[2]
