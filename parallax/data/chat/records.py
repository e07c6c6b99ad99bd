"""Records of chat files as one form: OpenAI's messages.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "...", "weight": 0}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}       ShareGPT
    {"prompt": "...", "completion": "..."}                          also two lists of messages, of which the second is learned

A message of the assistant may have a "weight", a number from 0 on: what the loss of its tokens counts; 0 leaves the turn as
context. Whatever else a message holds is handed to the chat template.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallax.data.encoding.lines import json_fault, kind_of

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # controls but tab and line ends; surrogates
FORMS = '"messages", "conversations", or "prompt" and "completion"'


class BadChat(ValueError):
    """A record that cannot be trained on; the text is a clause without the file, the line and the full stop."""


@dataclass(frozen=True)
class Chat:
    """A conversation. `weights` has one number for each message: what the loss of an assistant's turn counts."""

    messages: tuple[Message, ...]
    weights: tuple[float, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def assistant_turns(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]


def to_chat(record: Any) -> Chat:
    """Return the conversation that a record holds.

    Raises:
        BadChat: it has none of the three forms, a message is malformed, or no message of the assistant is to be learned.
    """
    if not isinstance(record, Mapping):
        raise BadChat(f"found {kind_of(record)}, but each record must be an object with {FORMS}")
    _check_strings(record)
    record = {key: value for key, value in record.items() if value is not None}  # tables have every key in every row
    if "messages" in record:
        messages = _messages(record["messages"], "messages")
    elif "conversations" in record:
        messages = [_from_sharegpt(item, k) for k, item in _numbered(record["conversations"], "conversations")]
        if "system" in record:
            messages.insert(0, {"role": "system", "content": record["system"]})
    elif "prompt" in record and "completion" in record:
        messages = _prompt_and_completion(record["prompt"], record["completion"])
    else:
        text = "; text to go on with is for pretrain.py" if isinstance(record.get("text"), str) else ""
        raise BadChat(
            f"found an object with the keys {sorted(map(str, record))[:8]}, but each record must have {FORMS}{text}"
        )
    pairs = [_checked(message, k) for k, message in enumerate(messages, 1)]
    chat = Chat(tuple(m for m, _ in pairs), tuple(w for _, w in pairs), _tools(record.get("tools")))
    if not chat.assistant_turns:
        raise BadChat("no message is the assistant's, so there is nothing to learn")
    if not any(chat.weights[i] for i in chat.assistant_turns):
        raise BadChat('every message of the assistant has "weight": 0, so there is nothing to learn')
    return chat


def _messages(value: Any, key: str) -> list[Message]:
    for k, item in _numbered(value, key):
        if not isinstance(item, Mapping):
            raise BadChat(f"message {k} is {kind_of(item)}, not an object")
    return [dict(item) for item in value]


def _numbered(value: Any, key: str) -> Iterator[tuple[int, Any]]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise BadChat(f'"{key}" is {kind_of(value)}, not a list')
    if not value:
        raise BadChat(f'"{key}" is empty')
    return enumerate(value, 1)


def _from_sharegpt(item: Any, k: int) -> Message:
    if not isinstance(item, Mapping):
        raise BadChat(f"message {k} is {kind_of(item)}, not an object")
    if item.get("from") is None and item.get("role") is not None:
        return dict(item)  # OpenAI's messages under ShareGPT's key
    role, value = item.get("from"), item.get("value")
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        raise BadChat(f"message {k} is from {_shown(role)}; known are {', '.join(SHAREGPT_ROLES)}")
    rest = {key: other for key, other in item.items() if key not in ("from", "value")}
    if role == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": [_parsed(value, f"message {k}")], **rest}
    return {"role": SHAREGPT_ROLES[role], "content": value, **rest}


def _prompt_and_completion(prompt: Any, completion: Any) -> list[Message]:
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadChat('"prompt" and "completion" must both be strings, or both lists of messages')
    context = _messages(prompt, "prompt")
    for message in context:
        if message.get("role") == "assistant":
            message["weight"] = 0
    return context + _messages(completion, "completion")


def _checked(message: Message, k: int) -> tuple[Message, float]:
    """Return a message with its content as text and its calls' arguments as objects, and its weight."""
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadChat(f"message {k} has the role {_shown(role)}; known are {', '.join(ROLES)}")
    weight = message.pop("weight", None)
    if weight is not None:
        _check_weight(weight, role, k)
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if "tool_calls" in message:
        if role != "assistant":
            raise BadChat(f"message {k}, of the role {role}, has tool calls; only the assistant's can")
        calls = [_tool_call(call, f"message {k}") for _, call in _numbered(message["tool_calls"], "tool_calls")]
        message["tool_calls"] = calls
    if "content" not in message and "tool_calls" not in message:
        raise BadChat(f"message {k} has no content")
    message["content"] = _text(message.get("content", ""), k)
    return message, 1.0 if weight is None else float(weight)


def _check_weight(weight: Any, role: str, k: int) -> None:
    number = isinstance(weight, int | float) and (not isinstance(weight, bool))
    if not number or not 0 <= weight < 1e6:
        raise BadChat(f"message {k} has the weight {_shown(weight)}; a weight is a number from 0 on, below a million")
    if role != "assistant" and weight:
        raise BadChat(f"message {k}, of the role {role}, has the weight {weight}; only the assistant's are learned")


def _text(content: Any, k: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise BadChat(f"the content of message {k} is {kind_of(content)}, not a string")
    parts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadChat(
                f"the content of message {k} has a part of the type {_shown(kind)}; only text can be trained on"
            )
        parts.append(part["text"])
    return "".join(parts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadChat(f"a tool call of {where} is no object with the name of a function")
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else _parsed(arguments, where)
    return {
        "type": "function",
        **(call if "function" in call else {}),
        "function": {**function, "arguments": arguments},
    }


def _parsed(value: Any, where: str) -> Any:
    """Return an object that may be written as a string of JSON, as OpenAI writes the arguments of calls."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError) as error:
            raise BadChat(f"a tool call of {where} is not valid JSON ({json_fault(error)})") from error
    if not isinstance(value, Mapping):
        raise BadChat(f"a tool call of {where} holds {kind_of(value)} where an object must be")
    _check_strings(value)
    return value


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools; none where there is an empty list or string, as in data sets whose records all have the same keys."""
    if isinstance(value, str) and not value.strip():
        return ()
    if isinstance(value, str):  # some ShareGPT files hold them as a string of JSON
        try:
            value = parse_json(value)
        except (ValueError, RecursionError) as error:
            raise BadChat(f'"tools" is a string but not valid JSON ({json_fault(error)})') from error
        _check_strings(value)
    if value is None or value == []:
        return ()
    for k, tool in _numbered(value, "tools"):
        if not isinstance(tool, Mapping):
            raise BadChat(f"tool {k} is {kind_of(tool)}, not an object")
    return tuple(dict(tool) for tool in value)


def parse_json(text: str) -> Any:
    """Parse JSON, without the NaN and Infinity that Python's parser lets pass.

    Raises:
        ValueError, RecursionError: it is none, or is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_strings(value: Any) -> None:
    """Refuse characters that no tokenizer has, and controls, which come from damaged files."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if found := _NO_TEXT.search(item):
                raise BadChat(_describe_character(found[0]))
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, float) and not math.isfinite(item):
            raise BadChat(f"a value is {item}, which is no number of JSON")


def _describe_character(character: str) -> str:
    if character >= "\ud800":
        return f"a text holds half of a surrogate pair (\\u{ord(character):04x}), which is no character"
    return f"a text holds the control character U+{ord(character):04X}; remove it"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
