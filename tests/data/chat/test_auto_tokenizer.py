"""What transformers' AutoTokenizer makes of a tokenizer that is saved with a model, and tokens that only its configuration adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallax.data.auto_tokenizer import notice_of_class
from parallax.data.chat.encoder import load_chat_encoder, notice_of_ids
from parallax.data.chat.options import ChatOptions
from parallax.data.chat.prepare import prepare_chats
from parallax.data.options import DataOptions
from parallax.data.prepare import prepare_data
from parallax.data.tokenizer_files import PROBES
from parallax.data.tokenizers import load_tokenizer
from parallax.errors import ConfigError
from tests.data.chat import tokenizers_of_the_test as made

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def chats(folder: Path) -> str:
    line = json.dumps({"prompt": "hello", "completion": "it is"})
    path = folder / "chats.jsonl"
    path.write_text(f"{line}\n{line}\n")
    return str(path)


def auto_tokenizer(tokenizer: Any, folder: Path, family: str) -> Any:
    from transformers import AutoTokenizer

    folder.mkdir()
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [None, "bytes"])
def test_there_is_a_notice_where_auto_tokenizer_gives_other_ids_than_a_tokenizer_of_ours(
    given: str | None, family: str, tmp_path: Path, default_tokenizer: Any
) -> None:
    ours = load_tokenizer(given) if given else default_tokenizer
    theirs = auto_tokenizer(ours, tmp_path / "saved", family)
    same = all(theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text) for text in PROBES)
    notice = notice_of_class(ours, family)
    assert (notice == "") == same
    if notice:
        assert family == "qwen2" and "PreTrainedTokenizerFast.from_pretrained" in notice


def test_the_families_whose_class_auto_tokenizer_passes_over_are_those_that_transformers_lists() -> None:
    from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS as LISTED

    noticed = {family for family in FAMILIES if notice_of_class(load_tokenizer("bytes"), family)}
    assert noticed == LISTED & set(FAMILIES)


def test_runs_with_a_qwen2_model_say_so_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello " * 100)
    options = DataOptions((str(tmp_path / "a.txt"),), "bytes", 0)
    chat_options = ChatOptions((chats(tmp_path),), "bytes", eval_fraction=0)
    for family, number in (("qwen2", 1), ("llama", 0)):
        assert len(prepare_data(options, 8, family).notices) == number
        assert len(prepare_chats(chat_options, 128, 300, family).notices) == number


def with_configuration(folder: Path, tokenizer: Any, **config: Any) -> str:
    made.save(tokenizer, folder, made.CHATML if "im_end" in str(tokenizer.eos_token) else made.LLAMA2)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


def test_a_class_that_puts_the_tokenizer_together_by_its_own_rules_is_named(tmp_path: Path) -> None:
    """LlamaTokenizer with legacy: false puts no space before a text that follows a special token."""
    for name, config, said in (
        ("own", {}, ""),
        ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False}, "of a llama model as LlamaTokenizer"),
    ):
        given = with_configuration(tmp_path / name, made.llama2_like(), **config)
        tokenizer, encoder = load_chat_encoder(given, None)
        notice = notice_of_ids(tokenizer, encoder, "llama")
        assert said in notice and bool(said) == bool(notice)
        theirs = auto_tokenizer(tokenizer, tmp_path / f"{name}-saved", "llama")
        text = encoder.sample()  # type: ignore[attr-defined]
        same = theirs(text, add_special_tokens=False)["input_ids"] == encoder.ids(text)  # type: ignore[attr-defined]
        assert same == (not said)


def test_tokens_that_only_the_configuration_adds_must_have_room_in_the_model(tmp_path: Path) -> None:
    tokenizer = made.byte_level()
    given = with_configuration(tmp_path / "more", tokenizer, extra_special_tokens=["<|turn_end|>"], pad_token="[PAD]")
    options = ChatOptions((chats(tmp_path),), given, eval_fraction=0)
    number = len(tokenizer)
    assert load_tokenizer(given).vocab_size == number
    for vocab_size in (number, number + 1):
        with pytest.raises(
            ConfigError,
            match=rf"has {number + 2} ids when transformers opens it, .* the model has room for {vocab_size}:",
        ):
            prepare_chats(options, 128, vocab_size)
    prepare_chats(options, 128, number + 2)
