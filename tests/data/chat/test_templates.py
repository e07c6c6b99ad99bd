"""Our own templates on tokenizers that bring none, and their counterparts in Jinja."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from parallax.data.chat.encoded import spans, token_weights
from parallax.data.chat.encoder import load_chat_encoder
from parallax.data.chat.records import BadChat, Chat, to_chat
from parallax.data.chat.templates import MARKUPS, OwnTemplate, jinja_of
from parallax.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from parallax.errors import ConfigError
from tests.data.chat import tokenizers_of_the_test as made

BYTES = ByteTokenizer()
CONTENT = st.one_of(
    st.sampled_from(["", " ", "\n", "<|im_end|>", "    return x", "hello "]),
    st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\u2581"), max_size=15),
)
CHATS = st.builds(
    lambda pairs: chat_of([turn for q, a in pairs for turn in (("user", q), ("assistant", a))]),
    st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3),
)
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}


def chat_of(turns: list[tuple[str, str]]) -> Chat:
    return to_chat({"messages": [{"role": role, "content": content} for role, content in turns]})


@pytest.fixture(scope="session")
def control_tokens(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    """A sentencepiece model that has ChatML's markers as tokens, a beginning of text, and puts a space before each text."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([made.TEXT, "def f(x):\n    return x\n"] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)


@pytest.fixture(scope="session")
def default_chatml(default_tokenizer: Tokenizer) -> OwnTemplate:
    return OwnTemplate("chatml", default_tokenizer)


def trained(encoder: OwnTemplate, chat: Chat) -> list[list[int]]:
    encoded = encoder.encode(chat)
    return [encoded.input_ids[a:b] for a, b in spans(token_weights(encoded, chat, "all", encoder.name))]


@pytest.mark.parametrize("name", sorted(MARKUPS))
@given(CHATS)
def test_trained_spans_are_contents_and_ends_of_turn_on_bytes(name: str, chat: Chat) -> None:
    encoder = OwnTemplate(name, BYTES)
    contents = [chat.messages[k]["content"] for k in chat.assistant_turns]
    end = list(ENDS[name].encode()) if name in ENDS else [BYTES.eos_id]
    assert trained(encoder, chat) == [[*content.encode(), *end] for content in contents]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chat=CHATS)
@example(chat=chat_of([("user", ""), ("assistant", "#")]))
@example(chat=chat_of([("user", ""), ("assistant", "<|endoftext|>")]))
def test_trained_spans_are_contents_and_ends_of_turn_on_sentencepiece(
    default_tokenizer: Tokenizer, default_chatml: OwnTemplate, chat: Chat
) -> None:
    """It has the end of turn as one token, and tokens that hold a header's line end and those that an answer begins with."""
    contents = [chat.messages[k]["content"] for k in chat.assistant_turns]
    for ids, content in zip(trained(default_chatml, chat), contents, strict=True):
        assert ids[-1] == default_tokenizer.token_id("<|im_end|>")
        text, first = default_tokenizer.decode(ids), default_tokenizer.decode(ids[:1])
        # Names of special tokens are these tokens in what is said, too, and have no text.
        said = re.sub(r"<\|(im_start|im_end|endoftext)\|>", "", content)
        shares_its_first = first.startswith("\n") and len(first) > 1  # with the header, as "\n\n" and "\n#" do
        assert text == said or (text == "\n" + said and shares_its_first)


def test_a_marker_that_the_vocabulary_has_is_one_token_and_the_beginning_of_text_comes_once(
    control_tokens: SentencePieceTokenizer,
) -> None:
    chat = chat_of([("user", "hello"), ("assistant", "hello there"), ("user", "bye"), ("assistant", "")])
    encoder = OwnTemplate("chatml", control_tokens)
    ids = encoder.encode(chat).input_ids
    end, start = control_tokens.token_id("<|im_end|>"), control_tokens.token_id("<|im_start|>")
    assert end is not None and start is not None
    assert ids.count(start) == ids.count(end) == 4
    assert ids[0] == control_tokens.bos_id and ids.count(ids[0]) == 1
    first, second = trained(encoder, chat)
    assert (control_tokens.decode(first[:-1]), first[-1]) == ("hello there", end) and second == [end]


@pytest.mark.parametrize("name", sorted(MARKUPS))
def test_a_prompt_has_the_ids_that_it_had_in_training(name: str, default_tokenizer: Tokenizer) -> None:
    encoder = OwnTemplate(name, default_tokenizer)
    whole = encoder.encode(chat_of([("user", "hi"), ("assistant", "    indented"), ("user", "x"), ("assistant", "y")]))
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "    indented"},
        {"role": "user", "content": "x"},
    ]
    assert encoder.prompt(Chat(tuple(turns[:1]), (1.0,))) == whole.input_ids[: whole.turns[0].start]
    assert encoder.prompt(Chat(tuple(turns), (1.0,) * 3)) == whole.input_ids[: whole.turns[1].start]


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é"}}}]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é"}}]


def all_kinds_of_chats(name: str) -> list[dict[str, Any]]:
    system, user, answer = ({"role": role, "content": f" {role}\n"} for role in ("system", "user", "assistant"))
    chats = [{"messages": [user, answer]}, {"messages": [system, user, answer, user, answer]}]
    if name == "chatml":
        both = {**CALL, "content": "so", "tool_calls": CALL["tool_calls"] * 2}
        chats += [
            {"messages": [*head, user, CALL, {"role": "tool", "content": "1"}, both], "tools": TOOLS}
            for head in ([], [system])
        ]
    return chats


@pytest.mark.parametrize("name", sorted(MARKUPS))
def test_transformers_writes_the_same_by_the_jinja_that_a_checkpoint_carries(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, encoder = load_chat_encoder("bytes", name)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for record in all_kinds_of_chats(name):
        chat = to_chat(record)
        for ours, prompt in ((encoder.encode(chat).input_ids, False), (encoder.prompt(chat), True)):
            ids = theirs.apply_chat_template(
                list(chat.messages), tools=list(chat.tools) or None, add_generation_prompt=prompt
            )
            assert ids["input_ids"] == ours


def test_calls_are_learned_in_chatml_and_refused_by_templates_that_know_none() -> None:
    chat = to_chat({"messages": [{"role": "user", "content": "q"}, CALL]})
    (ids,) = trained(OwnTemplate("chatml", BYTES), chat)
    assert bytes(ids).decode() == '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>'
    for name in ("llama3", "plain"):
        with pytest.raises(BadChat, match=f"the template {name} knows no tools and would drop them"):
            OwnTemplate(name, BYTES).encode(chat)


def test_what_the_options_name_is_opened(tmp_path: Path) -> None:
    folder = made.save(made.byte_level(), tmp_path / "chat", made.CHATML)
    bare = made.save(made.byte_level(), tmp_path / "bare", None)
    own = tmp_path / "own.jinja"
    own.write_text(made.LLAMA3)
    chat = chat_of([("user", "hi"), ("assistant", "hello")])
    _, theirs = load_chat_encoder(folder, None)
    assert theirs.template is None and theirs.name == folder
    for tokenizer, template, end in (
        (folder, None, "<|im_end|>"),
        (bare, str(own), "<|eot_id|>"),
        (bare, "chatml", "<|im_end|>"),
    ):
        opened, encoder = load_chat_encoder(tokenizer, template)
        encoded = encoder.encode(chat)
        assert encoder.pieces(encoded.input_ids)[encoded.turns[0].stop - 1] == end
        if template is not None:
            assert opened.files()["chat_template.jinja"].decode() == (
                own.read_text() if template == str(own) else jinja_of("chatml", opened)
            )
    _, chosen = load_chat_encoder(bare, None)
    assert chosen.name == "chatml" and chosen.notice.startswith(
        "the tokenizer brings no chat template, so it is chatml"
    )
    assert (
        theirs.notice == load_chat_encoder(bare, "chatml")[1].notice == load_chat_encoder("bytes", None)[1].notice == ""
    )
    with pytest.raises(ConfigError, match="--template nothing: there is no such template"):
        load_chat_encoder(folder, "nothing")
    with pytest.raises(ConfigError, match="Jinja needs a Hugging Face tokenizer"):
        load_chat_encoder("bytes", str(own))


def test_a_template_that_ends_turns_with_the_end_of_text_needs_one(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos_id = None
    with pytest.raises(ConfigError, match="--template plain ends turns with the end-of-text token, but bytes has none"):
        OwnTemplate("plain", tokenizer)
