"""The three forms of chats, and how malformed ones are told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallax.data.chat import files
from parallax.data.chat.files import check_chat_file, read_chats
from parallax.data.chat.records import BadChat, Chat, to_chat
from parallax.errors import ConfigError

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD = {"messages": [USER, ASSISTANT]}


def roles_and_contents(chat: Chat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.messages]


def test_the_three_forms_are_one() -> None:
    expected = [("user", "q"), ("assistant", "a")]
    assert roles_and_contents(to_chat(GOOD)) == expected
    sharegpt = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert roles_and_contents(to_chat(sharegpt)) == expected
    assert roles_and_contents(to_chat({"prompt": "q", "completion": "a"})) == expected
    with_system = to_chat({**sharegpt, "system": "s"})
    assert roles_and_contents(with_system) == [("system", "s"), *expected]


def test_a_prompt_that_is_a_list_of_messages_is_context_only() -> None:
    chat = to_chat({"prompt": [USER, ASSISTANT, USER], "completion": [{"role": "assistant", "content": "b"}]})
    assert chat.weights == (1.0, 0.0, 1.0, 1.0) and chat.assistant_turns == [1, 3]


def test_contents_in_parts_are_joined_and_nulls_are_absent() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = to_chat(
        {
            "messages": [{**USER, "name": None}, {"role": "assistant", "content": parts, "tool_calls": None}],
            "tools": None,
        }
    )
    assert chat.messages == (USER, {"role": "assistant", "content": "ab"})


def test_calls_of_tools_have_their_arguments_as_objects_in_every_form() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    openai = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools}
    function = {"name": "f", "arguments": {"x": [1, "é"]}}
    chat = to_chat(openai)
    assert chat.messages[1]["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert chat.messages[1]["content"] == "" and chat.tools == tuple(tools)
    written = {"from": "function_call", "value": json.dumps(function)}
    sharegpt = {"conversations": [{"from": "human", "value": "q"}, written, {"from": "observation", "value": "1"}]}
    chat = to_chat({**sharegpt, "tools": json.dumps(tools)})
    assert chat.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
    assert chat.messages[2] == {"role": "tool", "content": "1"} and chat.tools == tuple(tools)


@pytest.mark.parametrize("nothing", [{"tool_calls": []}, {"tool_calls": None}])
@pytest.mark.parametrize("tools", [{"tools": []}, {"tools": ""}, {"tools": "[]"}, {"tools": None}])
def test_what_a_table_holds_for_nothing_is_nothing(nothing: Any, tools: Any) -> None:
    """Data sets with one schema for all records have every key in each."""
    assert to_chat({"messages": [{**USER, **nothing}, {**ASSISTANT, **nothing}], **tools}) == to_chat(GOOD)


@pytest.mark.parametrize(
    "nothing", [{"arguments": None}, {"arguments": ""}, {"arguments": {}}, {"arguments": "{}"}, {}]
)
def test_a_call_without_arguments_has_none_in_whatever_words(nothing: Any) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", **nothing}}]}
    chat = to_chat({"messages": [USER, call]})
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_text_is_told_to_be_for_the_other_program_and_long_numbers_are_told_in_a_users_words(tmp_path: Path) -> None:
    with pytest.raises(BadChat, match=r"but each record must have .*; text to go on with is for pretrain\.py"):
        to_chat({"text": "Once upon a time"})
    path = tmp_path / "a.txt"
    path.write_text("Once upon\na time\n")
    first, second = (str(found) for _, found in read_chats(path))
    assert first.endswith("; text to go on with is for pretrain.py") and "pretrain" not in second
    path.write_text('{"messages": ' + "9" * 5000 + "}\n")
    ((_, found),) = read_chats(path)
    assert "Exceeds the limit (4300 digits)" in str(found) and "sys." not in str(found)


def test_bytes_as_a_table_may_hold_them_are_told_as_such() -> None:
    with pytest.raises(BadChat, match='"messages" is bytes, not a list'):
        to_chat({"messages": b"[]"})
    with pytest.raises(BadChat, match="the content of message 1 is bytes, not a string"):
        to_chat({"messages": [{"role": "user", "content": b"q"}, ASSISTANT]})


def test_weights_of_turns_are_kept() -> None:
    chat = to_chat(
        {"messages": [{**USER, "weight": 0}, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 0.25}]}
    )
    assert [chat.weights[k] for k in chat.assistant_turns] == [0, 0.25]
    assert all("weight" not in message for message in chat.messages)


MALFORMED: list[tuple[Any, str]] = [
    ([], "found a list, but each record must be an object with"),
    ("x", "found a string"),
    (None, "found null"),
    ({}, r"found an object with the keys \[\], but each record must have"),
    ({"text": "x"}, r"found an object with the keys \['text'\]"),
    ({"prompt": "x"}, "each record must have"),
    ({"messages": "x"}, '"messages" is a string, not a list'),
    ({"messages": {}}, '"messages" is an object, not a list'),
    ({"messages": []}, '"messages" is empty'),
    ({"messages": [1]}, "message 1 is a number, not an object"),
    ({"messages": [USER, {"content": "a"}]}, "message 2 has the role None; known are system, user, assistant, tool"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "message 1 has the role 'robot'"),
    ({"messages": [{"role": 1, "content": "a"}]}, "message 1 has the role 1"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "message 1 has the role"),
    ({"messages": [USER]}, "no message is the assistant's"),
    ({"messages": [USER, {"role": "assistant"}]}, "message 2 has no content"),
    ({"messages": [{"role": "user", "content": None}, ASSISTANT]}, "message 1 has no content"),
    ({"messages": [{"role": "user", "content": 5}, ASSISTANT]}, "the content of message 1 is a number, not a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ASSISTANT]},
        "has a part of the type 'image_url'",
    ),
    ({"messages": [{"role": "user", "content": [None]}, ASSISTANT]}, "has a part of the type 'null'"),
    ({"messages": [USER, {**ASSISTANT, "weight": -1}]}, "message 2 has the weight -1"),
    ({"messages": [USER, {**ASSISTANT, "weight": True}]}, "message 2 has the weight True"),
    ({"messages": [USER, {**ASSISTANT, "weight": "1"}]}, "message 2 has the weight '1'"),
    ({"messages": [USER, {**ASSISTANT, "weight": float("nan")}]}, "a value is nan"),
    ({"messages": [{**USER, "weight": 1}, ASSISTANT]}, "message 1, of the role user, has the weight 1"),
    ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, 'every message of the assistant has "weight": 0'),
    ({"messages": [{**USER, "tool_calls": [{}]}, ASSISTANT]}, "message 1, of the role user, has tool calls"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "message 2 has no content"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]},
        "a tool call of message 2 is no object with the name",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "a tool call of message 2 is not valid JSON",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
        "a tool call of message 2 holds a list where an object must be",
    ),
    ({"messages": [USER, {"role": "assistant", "content": "\x00"}]}, r"a text holds the control character U\+0000"),
    ({"messages": [USER, {"role": "assistant", "content": "a\x1b[1m"}]}, r"control character U\+001B"),
    ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, r"half of a surrogate pair \(\\ud800\)"),
    ({"messages": [USER, {"role": "assistant", "content": "a", "x": ["\udfff"]}]}, "half of a surrogate pair"),
    ({"messages": [USER, ASSISTANT], "tools": 5}, '"tools" is a number, not a list'),
    ({"messages": [USER, ASSISTANT], "tools": [5]}, "tool 1 is a number, not an object"),
    ({"messages": [USER, ASSISTANT], "tools": "{"}, '"tools" is a string but not valid JSON'),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "message 1 is from 'alien'; known are system, human"),
    ({"conversations": [{"from": "gpt"}]}, "message 1 has no content"),
    ({"conversations": ["x"]}, "message 1 is a string, not an object"),
    ({"prompt": "x", "completion": 1}, "must both be strings, or both lists of messages"),
]


@pytest.mark.parametrize(("record", "problem"), MALFORMED)
def test_a_malformed_record_is_told_in_one_clause(record: Any, problem: str) -> None:
    with pytest.raises(BadChat, match=problem) as caught:
        to_chat(record)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "weight", "tool_calls", "function", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "conversations", "prompt", "completion", "tools", "system"]), JSON))
def test_any_json_is_a_chat_or_told_what_is_wrong(record: Any) -> None:
    try:
        chat = to_chat(record)
    except BadChat:
        return
    assert chat.assistant_turns and all(isinstance(message["content"], str) for message in chat.messages)


def lines_of(path: Path, content: bytes) -> list[tuple[int, str]]:
    """Return (line, content of the answer, or what is wrong)."""
    path.write_bytes(content)
    return [(n, str(c) if isinstance(c, BadChat) else c.messages[-1]["content"]) for n, c in read_chats(path)]


def record(answer: str) -> bytes:
    return json.dumps({"prompt": "q", "completion": answer}, ensure_ascii=False).encode()


def test_lines_end_only_where_json_strings_cannot(tmp_path: Path) -> None:
    """Fault 21: U+2028, U+2029 and U+0085 are text; LF, CR LF and CR end lines; a byte order mark is none of it."""
    odd = "a\u2028b\u2029c\x85d"
    content = b"\xef\xbb\xbf" + record("1") + b"\r\n\r\n" + record(odd) + b"\r" + record("3") + b"\n   \n" + record("4")
    assert lines_of(tmp_path / "a.jsonl", content) == [(1, "1"), (3, odd), (4, "3"), (6, "4")]


def test_a_broken_line_is_told_with_its_number_and_does_not_end_the_reading(tmp_path: Path) -> None:
    broken = [
        (b"{", "this is not valid JSON (Expecting property name"),
        (b'{"prompt": "q", "completion": "\x01"}', "this is not valid JSON (Invalid control character"),
        (b'{"prompt": NaN, "completion": "a"}', "this is not valid JSON (NaN is no number of JSON"),
        (b'{"prompt": "q", "completion": "\xff"}', "the line is not UTF-8 text"),
        (b'{"prompt": "q", "completion": "\\ud83d"}', "half of a surrogate pair"),
        (b"[", "a file must have each chat on a line of its own, not one list of all"),
        (b"\x00", "this is not valid JSON"),
        (b"[" * 200_000, "the JSON is nested too deeply"),
        (b'{"x": ' + b"9" * 10_000 + b"}", "this is not valid JSON (Exceeds the limit"),
        (b'{"prompt": "q"} {"completion": "a"}', "this is not valid JSON (Extra data"),
    ]
    content = b"\n".join(line for bad, _ in broken for line in (bad, record("good")))
    found = lines_of(tmp_path / "a.jsonl", content)
    assert [n for n, _ in found] == list(range(1, 2 * len(broken) + 1))
    for (_, said), (_, expected) in zip(found[::2], broken, strict=True):
        assert said.startswith(expected) or expected in said
    assert [text for _, text in found[1::2]] == ["good"] * len(broken)


def test_a_line_that_does_not_end_is_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_CHARACTERS", 100)
    found = lines_of(tmp_path / "a.jsonl", record("1") + b"\n" + record("x" * 1000) + b"\n" + record("3"))
    assert found == [(1, "1"), (2, "the line has more than 100 characters"), (3, "3")]


def test_packed_files_are_read_as_they_are(tmp_path: Path) -> None:
    content = record("1") + b"\n" + record("\u2028") + b"\r\n" + b"broken\n"
    expected = lines_of(tmp_path / "a.jsonl", content)
    assert len(expected) == 3 and lines_of(tmp_path / "a.jsonl.gz", gzip.compress(content)) == expected
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz: the compressed file is cut short or damaged"):
        lines_of(tmp_path / "a.jsonl.gz", gzip.compress(content)[:-9])


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, which is an extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [USER, {**ASSISTANT, "weight": 0.5}], "id": 1},
        {"messages": [{"role": "user", "content": "no answer"}], "id": 2},
        {"messages": None, "id": 3},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = list(read_chats(tmp_path / "a.parquet"))
    assert [n for n, _ in found] == [1, 2, 3]
    assert (
        isinstance(found[0][1], Chat)
        and found[0][1].weights == (1.0, 0.5)
        and found[0][1].messages == (USER, ASSISTANT)
    )
    assert "no message is the assistant's" in str(found[1][1]) and "found an object with the keys ['id']" in str(
        found[2][1]
    )


def test_what_is_no_file_of_chats_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    for name, said in (
        ("absent", "there is no such file"),
        (".", "this is a folder; name the .jsonl"),
        ("a.gz", "the file is no .gz file, although its name says so"),
    ):
        (problem,) = check_chat_file(str(tmp_path / name))
        assert problem.startswith(f"--data {tmp_path / name}: ") and said in problem and problem.endswith(".")
