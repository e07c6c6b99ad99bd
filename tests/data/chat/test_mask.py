"""What is trained in chats of Hugging Face tokenizers: the assistant's content and its end of turn, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from parallax.data.chat.encoded import spans, token_weights
from parallax.data.chat.hugging_face import HuggingFaceTemplate
from parallax.data.chat.records import BadChat, Chat, to_chat
from parallax.errors import ConfigError
from tests.data.chat import tokenizers_of_the_test as made

BYTES = made.single_bytes()
MERGING = made.byte_level()
MERGING_TRIMMED = made.byte_level(trim_offsets=True)
LLAMA2 = made.llama2_like()


def chat_of(*messages: tuple[str, str] | dict[str, Any], **more: Any) -> Chat:
    dicts = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return to_chat({"messages": dicts, **more})


def encode(tokenizer: Any, template: str, chat: Chat, train_on: Any = "all") -> tuple[list[int], list[tuple[int, int]]]:
    encoder = HuggingFaceTemplate(tokenizer, "test", template)
    encoded = encoder.encode(chat)
    expected = tokenizer.apply_chat_template(
        list(chat.messages), tools=list(chat.tools) or None, chat_template=template, return_dict=True
    )["input_ids"]
    assert encoded.input_ids == expected, "the ids must be those of transformers"
    return encoded.input_ids, spans(token_weights(encoded, chat, train_on, encoder.name))


def trained_texts(tokenizer: Any, template: str, chat: Chat, train_on: Any = "all") -> list[str]:
    ids, found = encode(tokenizer, template, chat, train_on)
    return [tokenizer.decode(ids[start:stop], skip_special_tokens=False) for start, stop in found]


CONTENT = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "  \n ", "hello", " hello ", "<|im_end|>", "<|im_start|>assistant\n", "</s>", "placeholder0x"]
    ),
    st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), max_size=20),
)
CHATS = st.builds(
    lambda system, pairs: chat_of(
        *([("system", system)] if system is not None else []),
        *(m for question, answer in pairs for m in (("user", question), ("assistant", answer))),
    ),
    st.one_of(st.none(), CONTENT),
    st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4),
)


@settings(deadline=None, max_examples=150)
@given(CHATS)
def test_trained_spans_are_the_assistants_contents_and_their_ends_of_turn(chat: Chat) -> None:
    contents = [chat.messages[k]["content"] for k in chat.assistant_turns]
    assert trained_texts(BYTES, made.CHATML, chat) == [content + "<|im_end|>" for content in contents]
    assert trained_texts(BYTES, made.LLAMA3, chat) == [content.strip() + "<|eot_id|>" for content in contents]
    assert trained_texts(BYTES, made.CHATML, chat, "last") == [contents[-1] + "<|im_end|>"]


@settings(deadline=None, max_examples=150)
@given(CHATS, st.sampled_from([BYTES, MERGING, MERGING_TRIMMED]))
def test_the_mask_is_that_of_generation_marks_where_a_template_has_them(chat: Chat, tokenizer: Any) -> None:
    ids, found = encode(tokenizer, made.CHATML, chat)  # a template without marks
    theirs = tokenizer.apply_chat_template(
        list(chat.messages),
        chat_template=made.CHATML_WITH_GENERATION,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert ids == theirs["input_ids"]
    trained = {i for start, stop in found for i in range(start, stop)}
    if tokenizer is not MERGING_TRIMMED:  # whose offsets leave out spaces, so that transformers misses tokens of spaces
        assert trained == {i for i, learned in enumerate(theirs["assistant_masks"]) if learned}
    assert (ids, found) == encode(tokenizer, made.CHATML_WITH_GENERATION, chat)


@settings(deadline=None, max_examples=100)
@given(CHATS)
def test_offsets_that_leave_out_spaces_train_the_same_tokens(chat: Chat) -> None:
    assert encode(MERGING, made.CHATML, chat) == encode(MERGING_TRIMMED, made.CHATML, chat)


def test_a_token_that_joins_header_and_answer_is_the_answers() -> None:
    tokenizer = made.byte_level()
    chat = chat_of(("user", "hi"), ("assistant", "\nhello"))
    ids, found = encode(tokenizer, made.CHATML, chat)
    (start, stop), *others = found
    assert not others
    joined = tokenizer.decode(ids[start : start + 1])
    assert joined.startswith("\n\n"), "this vocabulary joins the header's line end with the answer's"
    assert tokenizer.decode(ids[start:stop]) == "\n\nhello<|im_end|>"


def test_the_end_of_turn_is_trained_where_it_is_the_padding_and_the_end_of_text_too() -> None:
    """Fault 24: decided by position; a token of the same value in a header or a question is not trained."""
    chat = chat_of(("user", "a<|im_end|>b"), ("assistant", "6"), ("user", "x"), ("assistant", "7"))
    assert BYTES.eos_token_id == BYTES.pad_token_id
    ids, found = encode(BYTES, made.CHATML, chat)
    trained_ends = [i for start, stop in found for i in range(start, stop) if ids[i] == BYTES.eos_token_id]
    assert [stop - 1 for _, stop in found] == trained_ends and len(trained_ends) == 2
    assert ids.count(BYTES.eos_token_id) == 5


def test_the_beginning_of_text_is_exactly_the_templates() -> None:
    """Fault 25: rendered text that is tokenized again gets no second beginning of text."""
    fast = made.byte_level(eos="</s>")
    from tokenizers import processors

    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.bos_token_id)]
    )
    assert fast("hi")["input_ids"][0] == fast.bos_token_id
    chat = chat_of(("user", "hi"), ("assistant", "hello"))
    for template, number in ((made.LLAMA3, 1), (made.CHATML, 0)):
        ids, _ = encode(fast, template, chat)
        assert ids.count(fast.bos_token_id) == number
    twice = made.LLAMA3.replace("{{- bos_token }}", "{{- bos_token + bos_token }}")
    assert encode(fast, twice, chat)[0][:3].count(fast.bos_token_id) == 2


def test_a_template_that_never_writes_the_assistants_words_is_refused_by_name() -> None:
    """Fault 26: an all-zero mask is no healthy run."""
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match="chat template of mine writes nothing of what the assistant says"):
        HuggingFaceTemplate(BYTES, "mine", silent)
    with pytest.raises(ConfigError, match="chat template of mine is no valid Jinja"):
        HuggingFaceTemplate(BYTES, "mine", "{% for %}")


@pytest.mark.parametrize("content", ["", " ", "\n\n", "   \t"])
@pytest.mark.parametrize("template", [made.CHATML, made.LLAMA3])
def test_an_empty_or_stripped_answer_trains_its_end_of_turn_and_not_what_follows(content: str, template: str) -> None:
    """Fault 27: a span that the template made empty does not run to the end of the sequence."""
    chat = chat_of(("user", "a"), ("assistant", content), ("user", "long question"), ("assistant", "b"))
    end = "<|im_end|>" if template == made.CHATML else "<|eot_id|>"
    kept = content if template == made.CHATML else ""
    assert trained_texts(BYTES, template, chat) == [kept + end, "b" + end]
    assert trained_texts(MERGING, template, chat)[0].endswith(end)


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_every_turn_ends_with_a_trained_end_of_turn_whether_or_not_it_is_the_end_of_text(eos: str) -> None:
    """Fault 29: the number of trained terminators is the number of the assistant's turns."""
    tokenizer = made.single_bytes(eos)
    chat = chat_of(*[(role, "x") for _ in range(5) for role in ("user", "assistant")])
    for template, name in ((made.CHATML, "<|im_end|>"), (made.LLAMA3, "<|eot_id|>")):
        ids, found = encode(tokenizer, template, chat)
        assert [ids[stop - 1] for _, stop in found] == [tokenizer.convert_tokens_to_ids(name)] * 5


def test_a_template_that_ends_only_the_last_turn_is_refused_unless_only_that_is_learned() -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token if loop.last else '' }}{{ '\\n' }}{% endfor %}"
    chat = chat_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(BadChat, match="chat template of test writes no end of turn behind message 2"):
        encode(BYTES, template, chat)
    assert trained_texts(BYTES, template, chat, "last") == ["d<|im_end|>"]


def test_an_end_of_turn_in_plain_words_is_trained_without_the_white_space_behind_it() -> None:
    template = "{% for m in messages %}{{ '### ' + m.role + '\\n' + m.content + '\\n### end\\n\\n' }}{% endfor %}"
    chat = chat_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d "))
    assert trained_texts(BYTES, template, chat) == ["b\n### end", "d \n### end"]


def test_llama_2_keeps_the_space_that_its_template_writes_before_the_end() -> None:
    chat = chat_of(("user", "hi"), ("assistant", "hello"), ("user", "he"), ("assistant", " hello "))
    assert trained_texts(LLAMA2, made.LLAMA2, chat) == ["hello </s>", "hello </s>"]
    ids, found = encode(LLAMA2, made.LLAMA2, chat)
    assert [LLAMA2.convert_ids_to_tokens(ids[start]) for start, _ in found] == ["\u2581hello", "\u2581hello"]


def test_a_thought_is_learned_where_the_template_keeps_it_and_only_there() -> None:
    """The template writes earlier turns differently once others follow, and its thoughts stand before the content."""
    thought = "<think>\nhm\n</think>\n\n"
    chat = chat_of(("user", "a"), ("assistant", thought + "b"), ("user", "c"), ("assistant", thought + "d"))
    assert trained_texts(BYTES, made.QWEN, chat) == ["b<|im_end|>", thought + "d<|im_end|>"]
    plain = chat_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert trained_texts(BYTES, made.QWEN, plain) == ["b<|im_end|>", "d<|im_end|>"]


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
WRITTEN_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_calls_of_tools_are_learned_and_their_answers_are_not() -> None:
    chat = chat_of(
        ("user", "q"),
        CALL,
        {"role": "tool", "content": "1"},
        ("assistant", "one"),
        tools=[{"name": "f", "parameters": {}}],
    )
    assert trained_texts(BYTES, made.QWEN, chat) == [WRITTEN_CALL + "<|im_end|>", "one<|im_end|>"]
    both = chat_of(("user", "q"), {**CALL, "content": "so:"}, {"role": "tool", "content": "1"})
    assert trained_texts(BYTES, made.QWEN, both) == ["so:\n" + WRITTEN_CALL + "<|im_end|>"]


def test_a_template_that_leaves_something_out_says_so() -> None:
    """Fault 33: a template that knows no tool calls would drop them and train an empty turn."""
    with pytest.raises(BadChat, match="chat template of test leaves out the tool calls of message 2"):
        encode(BYTES, made.CHATML, chat_of(("user", "q"), CALL))
    with pytest.raises(BadChat, match="chat template of test leaves out the tool calls of message 2"):
        encode(BYTES, made.LLAMA3, chat_of(("user", "q"), {**CALL, "content": " so "}))
    with pytest.raises(BadChat, match="chat template of test knows no tools and leaves them out"):
        encode(BYTES, made.CHATML, chat_of(("user", "q"), ("assistant", "a"), tools=[{"name": "f"}]))
    no_system = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    with pytest.raises(BadChat, match="chat template of test leaves out message 1, of the role system"):
        encode(BYTES, no_system, chat_of(("system", "s"), ("user", "q"), ("assistant", "a")))


# As a template that writes a call in place of what is said beside it, and only the first of several.
ONE_CALL = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.tool_calls %}{{- m.tool_calls[0].function | tojson }}{%- else %}{{- m.content }}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}"""
TOOLS_FOR_SYSTEM = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'system' and tools %}{{- tools | tojson }}{%- else %}{{- m.content }}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}"""


def test_what_is_left_out_of_one_kind_of_chat_is_told_after_chats_of_another_kind_too() -> None:
    """Kinds differ by tools and calls, not by roles alone."""
    encoder = HuggingFaceTemplate(BYTES, "test", ONE_CALL)
    encoder.encode(chat_of(("user", "q"), ("assistant", "a")))
    with pytest.raises(BadChat, match="chat template of test leaves out message 2, of the role assistant"):
        encoder.encode(chat_of(("user", "q"), {**CALL, "content": "so:"}))
    encoder = HuggingFaceTemplate(BYTES, "test", TOOLS_FOR_SYSTEM)
    messages = (("system", "s"), ("user", "q"), ("assistant", "a"))
    encoder.encode(chat_of(*messages))
    with pytest.raises(BadChat, match="chat template of test leaves out message 1, of the role system"):
        encoder.encode(chat_of(*messages, tools=[{"name": "f"}]))


def test_each_of_several_calls_must_be_written() -> None:
    encoder = HuggingFaceTemplate(BYTES, "test", ONE_CALL)
    encoder.encode(chat_of(("user", "q"), CALL))
    with pytest.raises(BadChat, match="chat template of test leaves out call 2 of the tool calls of message 2"):
        encoder.encode(chat_of(("user", "q"), {**CALL, "tool_calls": CALL["tool_calls"] * 2}))
    twice = chat_of(("user", "q"), {**CALL, "tool_calls": CALL["tool_calls"] * 2})
    assert trained_texts(BYTES, made.QWEN, twice) == [f"{WRITTEN_CALL}\n{WRITTEN_CALL}<|im_end|>"]


def test_a_token_that_is_no_special_one_ends_no_turn() -> None:
    """A line end that was added to the vocabulary as a word, behind which the end of turn stands."""
    tokenizer = made.single_bytes()
    tokenizer.add_tokens(["\n"])
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n<|im_end|>\n' }}{% endfor %}"
    chat = chat_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert trained_texts(tokenizer, template, chat) == ["b\n<|im_end|>", "d\n<|im_end|>"]


def with_swallowing(name: str) -> Any:
    """A tokenizer with a token that takes the white space behind it, as <|assistant|> of Phi-3."""
    tokenizer = made.single_bytes()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(name, rstrip=True, normalized=False)]})
    return tokenizer


@pytest.mark.parametrize("content", ["b", "\nb", "  b", " "])
def test_a_token_of_the_header_that_swallows_white_space_is_not_the_assistants(content: str) -> None:
    tokenizer = with_swallowing("<|assistant|>")
    template = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    chat = chat_of(("user", "a"), ("assistant", content), ("user", "c"), ("assistant", "d"))
    assert trained_texts(tokenizer, template, chat) == [content.strip() + "<|im_end|>", "d<|im_end|>"]


# Phi-3's form: every turn ends with a marker and a line end, and the conversation with the end of text.
PHI3 = """\
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""
SYSTEM_LAST = """\
{%- for m in messages if m.role != 'system' %}{{- '### ' + m.role + '\\n' + m.content + '\\n### end\\n\\n' }}{%- endfor %}
{%- for m in messages if m.role == 'system' %}{{- '### system\\n' + m.content }}{%- endfor %}"""


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_the_end_of_turn_is_what_follows_every_turn_and_not_what_ends_the_conversation(eos: str) -> None:
    """In a vocabulary without the markers, where the last turn has more behind it than the others."""
    tokenizer = made.single_bytes(eos)
    chat = chat_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d "))
    assert trained_texts(tokenizer, PHI3, chat) == ["b<|end|>", "d <|end|>"]
    assert trained_texts(tokenizer, PHI3, chat_of(("user", "a"), ("assistant", "b"))) == ["b<|end|>"]
    with_system = chat_of(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert trained_texts(tokenizer, SYSTEM_LAST, with_system) == ["b\n### end", "d\n### end"]
    short = chat_of(("system", "s"), ("user", "a"), ("assistant", "b"))
    assert trained_texts(tokenizer, SYSTEM_LAST, short) == ["b\n### end"]


def test_white_space_which_an_answer_may_hold_too_ends_no_turn() -> None:
    template = "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
    chat = chat_of(("user", "a"), ("assistant", "one\n\ntwo"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(
        BadChat, match="writes no end of turn behind message 2, or only white space, which answers hold"
    ):
        encode(BYTES, template, chat)
    assert len(trained_texts(BYTES, template, chat, "full")) == 1


def test_a_header_that_depends_on_the_answer_is_told_as_such() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + (m.content | length | string) + '\n' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(BadChat, match="writes before message 2 something else than before an answer that is yet to be"):
        encode(BYTES, template, chat_of(("user", "a"), ("assistant", "b")))


def test_what_the_template_refuses_is_told_in_its_own_words() -> None:
    with pytest.raises(BadChat, match=r"chat template of test cannot write this chat \(Only user and assistant roles"):
        encode(LLAMA2, made.LLAMA2, chat_of(("system", "s"), ("user", "q"), ("assistant", "a")))


def test_a_turn_whose_place_cannot_be_told_is_refused() -> None:
    """A template that turns answers around, and counts the messages in front: no prefix of it is stable."""
    template = (
        "{{ messages | length }}{% for m in messages %}{{ m.role + ':' }}"
        "{{ (m.content if m.content.startswith('placeholder') else m.content + m.content) ~ '!' * m.content | length }}"
        "{{ '<|im_end|>' }}{% endfor %}"
    )
    with pytest.raises(BadChat, match="writes message 2 differently once others follow"):
        encode(BYTES, template, chat_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "dd")))


def test_everything_is_learned_when_that_is_asked_for() -> None:
    chat = chat_of(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    ids, found = encode(BYTES, made.CHATML, chat, "full")
    assert found == [(0, len(ids))]
    silenced = chat_of(("user", "a"), {"role": "assistant", "content": "b", "weight": 0}, ("assistant", "c"))
    texts = trained_texts(BYTES, made.CHATML, silenced, "full")
    assert texts == ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "\n<|im_start|>assistant\nc<|im_end|>\n"]


def test_a_turn_of_weight_0_is_context_and_other_weights_are_kept() -> None:
    chat = chat_of(
        ("user", "a"),
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "assistant", "content": "c", "weight": 0.5},
    )
    assert trained_texts(BYTES, made.CHATML, chat) == ["c<|im_end|>"]
    encoded = HuggingFaceTemplate(BYTES, "test", made.CHATML).encode(chat)
    assert set(token_weights(encoded, chat, "all", "test").tolist()) == {0.0, 0.5}
    last = chat_of(("user", "a"), ("assistant", "b"), {"role": "assistant", "content": "c", "weight": 0})
    with pytest.raises(BadChat, match="no token is trained"):
        encode(BYTES, made.CHATML, last, "last")


class WithoutOffsets:
    """A tokenizer that tells no offsets, as those written in Python."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **more: Any) -> Any:
        return self.tokenizer(text, **more)


@settings(deadline=None, max_examples=60)
@given(CHATS)
def test_a_tokenizer_without_offsets_trains_the_same_by_prefixes(chat: Chat) -> None:
    assert encode(WithoutOffsets(BYTES), made.CHATML, chat) == encode(BYTES, made.CHATML, chat)


def test_a_tokenizer_without_offsets_whose_tokens_run_over_a_border_is_refused() -> None:
    assert trained_texts(WithoutOffsets(MERGING), made.CHATML, chat_of(("user", "a"), ("assistant", "b"))) == [
        "b<|im_end|>"
    ]
    with pytest.raises(BadChat, match="tells no character offsets, and joins the header or the end of a turn"):
        encode(WithoutOffsets(MERGING), made.CHATML, chat_of(("user", "a"), ("assistant", "\nb")))


def test_a_prompt_for_generation_is_the_chat_and_the_header_of_the_answer() -> None:
    encoder = HuggingFaceTemplate(BYTES, "test", made.CHATML)
    whole = encoder.encode(chat_of(("user", "hi"), ("assistant", "hello")))
    prompt = encoder.prompt(Chat(({"role": "user", "content": "hi"},), (1.0,)))
    assert prompt == whole.input_ids[: whole.turns[0].start]
