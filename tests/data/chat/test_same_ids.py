"""Training sees the ids that `transformers` gives with the files in a checkpoint, and what is learned lies where the text says.

For each tokenizer and each of our templates, with and without the markers in the vocabulary. The texts and the places of the
assistant's turns are written down here again, in a plain loop.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallax.data.chat.encoded import ChatEncoder, spans, token_weights
from parallax.data.chat.encoder import load_chat_encoder
from parallax.data.chat.hugging_face import load_hugging_face
from parallax.data.chat.records import Chat, to_chat
from parallax.data.tokenizers import load_tokenizer
from parallax.errors import ConfigError
from tests.data.chat import tokenizers_of_the_test as made

CONTROL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CONTENT = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "\n",
            "\n\n",
            ">\n",
            "<|im_end|>",
            "<|im_start|>user\n",
            "<s>",
            "</s>",
            "<|endoftext|>",
            "\u2581",
            "  x = 1\n",
        ]
    ),
    st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), max_size=15),
    st.text(alphabet="hello \n:<|>", max_size=12),
)
CHATS = st.builds(
    lambda system, pairs: to_chat(
        {
            "messages": [
                *([{"role": "system", "content": system}] if system is not None else []),
                *({"role": r, "content": c} for q, a in pairs for r, c in (("user", q), ("assistant", a))),
            ]
        }
    ),
    st.one_of(st.none(), CONTENT),
    st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3),
)


def written(template: str, chat: Chat, bos: str, eos: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the chat as text, and where the assistant's contents with their ends of turn stand in it."""
    text, places = bos, []
    for message in chat.messages:
        role, content = message["role"], message["content"]
        header, end, between = {
            "chatml": (f"<|im_start|>{role}\n", "<|im_end|>", "\n"),
            "llama3": (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""),
            "plain": (f"{role.capitalize()}:\n", eos if role == "assistant" else "", "\n\n"),
        }[template]
        start = len(text + header)
        text += header + content + end
        if role == "assistant":
            places.append((start, len(text)))
        text += between
    return text, places


def sentencepiece_model(folder: Path, model_type: str = "bpe", **options: Any) -> str:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    texts = [made.TEXT, "def f(x):\n    return x >\n", "a>\nb>\nc|>\n" * 9, "<|im_start|>assistant\nhello<|im_end|>\n"]
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 3),
        model_writer=model,
        model_type=model_type,
        vocab_size=430,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity" if model_type == "bpe" else "nfkc",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    folder.mkdir()
    (folder / "own.model").write_bytes(model.getvalue())
    return str(folder / "own.model")


def gpt2_like(folder: Path) -> str:
    """A folder without the markers, whose configuration names no special token, as those of GPT-2 on the hub."""
    tokenizer = made.byte_level(
        special=["<|endoftext|>"], use_regex=True, eos="<|endoftext|>", pad="<|endoftext|>", bos="<|endoftext|>"
    )
    made.save(tokenizer, folder, None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return str(folder)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, default_tokenizer: Any) -> dict[str, str | None]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "default": None,
        "bytes": "bytes",
        "sentencepiece": sentencepiece_model(root / "bare"),
        "sentencepiece, begins with no space": sentencepiece_model(root / "no-space", add_dummy_prefix=False),
        "sentencepiece, markers": sentencepiece_model(root / "markers", control_symbols=CONTROL),
        "byte level": made.save(made.byte_level(special=["<s>", "</s>"], eos="</s>", pad="</s>"), root / "plain", None),
        "byte level, markers": made.save(made.byte_level(), root / "chat", None),
        "gpt2": gpt2_like(root / "gpt2"),
        "llama2": made.save(made.llama2_like(), root / "llama2", None),
    }


NAMES = [
    "default",
    "bytes",
    "sentencepiece",
    "sentencepiece, begins with no space",
    "sentencepiece, markers",
    "byte level",
    "byte level, markers",
    "gpt2",
    "llama2",
]


@pytest.fixture(scope="session")
def opened(
    tokenizers: dict[str, str | None], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[ChatEncoder, Any]]:
    """For each tokenizer and template the encoder of training, and what `transformers` opens from a saved model's folder."""
    from transformers import AutoTokenizer, LlamaConfig

    found = {}
    for name, path in tokenizers.items():
        for template in ("chatml", "llama3", "plain"):
            tokenizer, encoder = load_chat_encoder(path, template)
            folder = tmp_path_factory.mktemp("saved")
            LlamaConfig().save_pretrained(folder)
            tokenizer.save(folder)
            found[name, template] = encoder, AutoTokenizer.from_pretrained(folder)
    return found


@pytest.mark.parametrize("template", ["chatml", "llama3", "plain"])
@pytest.mark.parametrize("name", NAMES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(chat=CHATS)
def test_ids_are_those_of_transformers_and_the_learned_ones_are_told_by_their_place(
    name: str, template: str, opened: dict[tuple[str, str], tuple[ChatEncoder, Any]], chat: Chat
) -> None:
    encoder, theirs = opened[name, template]
    encoded = encoder.encode(chat)
    assert encoded.input_ids == theirs.apply_chat_template(list(chat.messages))["input_ids"]
    bos, eos = BEGIN_AND_END[name]
    text, places = written(template, chat, bos, eos)
    assert text == theirs.apply_chat_template(list(chat.messages), tokenize=False)
    tokens = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    assert tokens["input_ids"] == encoded.input_ids
    learned = [any(a < stop and max(b, a + 1) > start for start, stop in places) for a, b in tokens["offset_mapping"]]
    found = spans(token_weights(encoded, chat, "all", encoder.name))
    assert [any(start <= i < stop for start, stop in found) for i in range(len(learned))] == learned
    assert len(encoded.turns) == len(places)
    prompt = Chat(chat.messages[:-1], chat.weights[:-1])
    ids = theirs.apply_chat_template(list(prompt.messages), add_generation_prompt=True)["input_ids"]
    assert encoder.prompt(prompt) == ids


BEGIN_AND_END = {
    "default": ("", "<|endoftext|>"),
    "bytes": ("", "<|endoftext|>"),
    "sentencepiece": ("<s>", "</s>"),
    "sentencepiece, begins with no space": ("<s>", "</s>"),
    "sentencepiece, markers": ("<s>", "</s>"),
    "byte level": ("<s>", "</s>"),
    "byte level, markers": ("<s>", "<|im_end|>"),
    "gpt2": ("", "<|endoftext|>"),
    "llama2": ("<s>", "</s>"),
}


def test_an_end_of_turn_that_shares_a_token_with_the_line_end_behind_it_is_learned_with_it(
    opened: dict[tuple[str, str], tuple[ChatEncoder, Any]],
) -> None:
    encoder, _ = opened["sentencepiece, begins with no space", "chatml"]
    chat = to_chat({"prompt": "hi", "completion": "hello"})
    encoded = encoder.encode(chat)
    pieces = encoder.pieces(encoded.input_ids)
    ((start, stop),) = spans(token_weights(encoded, chat, "all", encoder.name))
    assert (
        "".join(pieces[start:stop]) == "hello<|im_end|>\n" and pieces[stop - 1].endswith(">\n") and stop == len(pieces)
    )


def test_the_default_tokenizer_ends_a_turn_of_the_default_template_by_one_token(
    opened: dict[tuple[str, str], tuple[ChatEncoder, Any]],
) -> None:
    encoder, theirs = opened["default", "chatml"]
    chat = to_chat({"prompt": "hi", "completion": "hello"})
    encoded = encoder.encode(chat)
    ((start, stop),) = spans(token_weights(encoded, chat, "all", encoder.name))
    assert encoded.input_ids[stop - 1] == theirs.convert_tokens_to_ids("<|im_end|>")
    assert theirs.decode(encoded.input_ids[start : stop - 1]) == "hello" and stop == len(encoded.input_ids) - 1
    assert load_chat_encoder(None, None)[1].name == "chatml"


def test_a_sentencepiece_model_that_transformers_cannot_open_encodes_for_itself_by_the_same_places(
    tmp_path: Path,
) -> None:
    """A unigram model that normalises: it is saved as its .model alone."""
    path = sentencepiece_model(tmp_path / "unigram", "unigram", control_symbols=CONTROL[:2])
    tokenizer, encoder = load_chat_encoder(path, None)
    assert set(tokenizer.files()) == {"tokenizer.model", "chat_template.jinja"}
    chat = to_chat(
        {"messages": [{"role": r, "content": c} for r, c in (("user", "hi é"), ("assistant", "hello 漢字 there"))]}
    )
    for template, end in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("plain", "</s>")):
        _, encoder = load_chat_encoder(path, template)
        encoded = encoder.encode(chat)
        ((start, stop),) = spans(token_weights(encoded, chat, "all", template))
        learned = encoded.input_ids[start:stop]
        ends_with = [tokenizer.token_id(end)] if tokenizer.token_id(end) is not None else tokenizer.encode(end)
        assert learned == [*tokenizer.encode("hello 漢字 there"), *ends_with]
        assert tokenizer.token_name(encoded.input_ids[0]) == "<s>"


def test_a_checkpoint_of_such_a_model_goes_on_with_the_template_that_it_was_trained_with(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "unigram", "unigram")
    for name in ("llama3", "plain", "chatml"):
        tokenizer, encoder = load_chat_encoder(path, name)
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name)
        _, again = load_chat_encoder(str(tmp_path / name), None)
        assert (again.name, again.fingerprint) == (name, encoder.fingerprint)
    (tmp_path / "chatml" / "chat_template.jinja").write_text(made.LLAMA2)
    with pytest.raises(ConfigError, match=r"brings a chat template, but no tokenizer\.json to use it with"):
        load_chat_encoder(str(tmp_path / "chatml"), None)
    assert load_chat_encoder(str(tmp_path / "chatml"), "plain")[1].name == "plain"


def test_a_tokenizer_model_of_another_format_beside_tokenizer_json_is_left_alone(tmp_path: Path) -> None:
    """Llama 3 brings a list of tokens of that name."""
    load_tokenizer("bytes").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(made.LLAMA2)
    _, alone = load_chat_encoder(str(tmp_path), None)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    _, beside = load_chat_encoder(str(tmp_path), None)
    assert beside.fingerprint == alone.fingerprint


def test_a_run_of_ours_is_the_same_with_and_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves its sentencepiece model beside tokenizer.json, and both give the same ids. So a run goes on when it is installed."""
    chat = to_chat({"messages": [{"role": r, "content": c} for r, c in (("user", "f(x)?"), ("assistant", "No: > \n"))]})
    load_tokenizer(None).save(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    installed, used = load_chat_encoder(str(tmp_path), None)
    with_it = load_hugging_face(tmp_path / "tokenizer.json", load_tokenizer(str(tmp_path)), str(tmp_path), None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer, without = load_chat_encoder(str(tmp_path), None)
    assert (tokenizer.fingerprint, without.fingerprint) == (installed.fingerprint, used.fingerprint)
    assert type(with_it) is not type(without)
    first, second = with_it.encode(chat), without.encode(chat)
    assert first.input_ids == second.input_ids
    for train_on in ("all", "last", "full"):
        weights = [token_weights(encoded, chat, train_on, "a") for encoded in (first, second)]  # type: ignore[arg-type]
        assert weights[0].tolist() == weights[1].tolist()
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("{", "{ ", 1))  # another's, which may have other tokens
    with pytest.raises(ConfigError, match="pip install transformers"):
        load_chat_encoder(str(tmp_path), None)
