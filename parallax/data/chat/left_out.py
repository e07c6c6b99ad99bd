"""Whether a chat template writes all that a chat holds: each message, each call of a tool, the tools.

A template that leaves something out trains a model on other conversations than those in the file. So each chat is written once more
with words in it that stand nowhere else; what holds for one chat holds for all of its kind, so only the first of a kind is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallax.data.chat.records import BadChat, Chat, Message

Kind = tuple[bool, tuple[tuple[str, ...], ...]]
"""Whether there are tools; and of each message its role, what it holds, and a word for each call."""


class CompletenessCheck:
    """Compares what a chat holds with what `render(messages, tools)` writes; `name` is the template's, for errors."""

    def __init__(self, render: Callable[[Sequence[Message], Sequence[Any]], str], name: str) -> None:
        self._render = render
        self._name = name
        self._complete: set[Kind] = set()  # of which the template leaves out nothing

    def __call__(self, chat: Chat, text: str) -> None:
        """Compare; `text` is the chat as the template writes it.

        Raises:
            BadChat: the template leaves something out.
        """
        if chat.tools and self._render(chat.messages, ()) == text:
            raise BadChat(f"the chat template of {self._name} knows no tools and leaves them out")
        kind = _kind_of(chat)
        if kind in self._complete:
            return
        messages, marks = _marked(chat, placeholder(text))
        try:
            written = self._render(messages, chat.tools)
        except BadChat:
            return  # a template that reads what messages say, and does not like these
        for mark, what in marks.items():
            if mark not in written:
                raise BadChat(f"the chat template of {self._name} leaves out {what}")
        self._complete.add(kind)


def _kind_of(chat: Chat) -> Kind:
    return bool(chat.tools), tuple(
        (message["role"], *sorted(key for key, value in message.items() if value), *("call" for _ in _calls(message)))
        for message in chat.messages
    )


def _marked(chat: Chat, mark: str) -> tuple[list[Message], dict[str, str]]:
    """Return the messages with a word of its own for each content and each called function; and what each word stands for."""
    messages: list[Message] = []
    marks: dict[str, str] = {}
    for k, message in enumerate(chat.messages):
        message, calls = dict(message), []
        if message["content"]:
            message["content"] = f"{mark}{k}x"
            marks[message["content"]] = f"message {k + 1}, of the role {message['role']}"
        for j, call in enumerate(_calls(message)):
            name = f"{mark}{k}call{j}x"
            calls.append({**call, "function": {**call["function"], "name": name}})
            which = f"call {j + 1} of the tool calls" if len(_calls(message)) > 1 else "the tool calls"
            marks[name] = f"{which} of message {k + 1}"
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    return messages, marks


def _calls(message: Message) -> Sequence[dict[str, Any]]:
    calls: Sequence[dict[str, Any]] = message.get("tool_calls", ())
    return calls


def placeholder(text: str) -> str:
    """Return a word that is not in `text`."""
    number = 0
    while (mark := f"placeholder{number}x") in text:
        number += 1
    return mark
