"""Chat templates of Hugging Face tokenizers, and where the assistant's turns stand in what they write.

A template is a program: nobody but the template knows where it puts a message, and it may strip, rewrite or leave out what it is
given. So each chat is written once more for each turn, with a placeholder in the turn's place:

    written            <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n<|im_start|>user\\nbye...
    with placeholder   <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n  X  <|im_end|>\\n<|im_start|>user\\nbye...
                       └───────────────── before ────────────────────────┘     └──────────── after ────────────────┘

If the written chat begins with `before` and ends with `after`, what lies between them is the turn's content, to the character,
however the template changed it. If it does not (a thought that only the last turn keeps), the turn lies between the chats written
up to it, with and without it; if those are not prefixes of the whole either, the chat is refused. The end of turn is what the
template writes behind the content both where the conversation ends and where it goes on: up to its first special token, or,
without one, all of it but white space at its end.

The text is tokenized once, as `transformers` does, and a token is trained if any of its characters is: a token that holds the end
of a header and the beginning of the answer is the answer's. That is the rule by which `transformers` reads {% generation %} marks,
which are not needed here. A tokenizer that tells no offsets is asked for the ids of the text up to each border instead; where
those are not the first ids of the whole, the chat is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallax.data.cache import digest
from parallax.data.chat.encoded import EncodedChat, Turn
from parallax.data.chat.marked_text import tokens_touching, with_fast_tokenizer
from parallax.data.chat.records import BadChat, Chat, Message
from parallax.data.chat.templates import DEFAULT_TEMPLATE, MARKUPS, jinja_of
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError

PROBE: tuple[Message, ...] = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


class HuggingFaceTemplate:
    """A tokenizer of `transformers` with a chat template, its own or `template`; a `ChatEncoder`.

    Raises:
        ConfigError: the template is no valid Jinja, or never writes what the assistant says.
    """

    def __init__(self, tokenizer: Any, name: str, template: str | None = None, notice: str = "") -> None:
        self.name = name
        self.notice = notice
        self.tokenizer = tokenizer
        self.template = template
        self._added = _added_tokens(tokenizer)
        core = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None
        self._fast = with_fast_tokenizer(core) if core is not None else None
        self._complete: set[tuple[str, ...]] = set()  # sequences of roles of which the template leaves out none
        texts = (template or tokenizer.chat_template, tokenizer.special_tokens_map)
        vocabulary = core or json.dumps(tokenizer.get_vocab(), sort_keys=True)
        self.fingerprint = digest("hugging face template", json.dumps(texts, default=str, sort_keys=True), vocabulary)
        self._check()

    def encode(self, chat: Chat) -> EncodedChat:
        text = self._render(chat.messages, chat.tools)
        self._check_nothing_is_left_out(chat, text)
        places = [(k, *self._place(chat, k, text)) for k in chat.assistant_turns]
        ids, borders = self._tokenize(text, [(start, stop) for _, start, stop, _ in places])
        turns = [Turn(k, *border, ends) for (k, _, _, ends), border in zip(places, borders, strict=True)]
        return EncodedChat(ids, tuple(turns))

    def prompt(self, chat: Chat) -> list[int]:
        return self._tokenize(self._render(chat.messages, chat.tools, add_generation_prompt=True), [])[0]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        texts = [self.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        names = self.tokenizer.convert_ids_to_tokens(list(ids))
        whole = (text and "\ufffd" not in text for text in texts)
        return [text if good else name for text, name, good in zip(texts, names, whole, strict=True)]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] = (), **more: Any) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, chat_template=self.template, tokenize=False, **more
            )
        except Exception as error:  # a template is a program, which can fail in any way
            raise BadChat(f"the chat template of {self.name} cannot write this chat ({error})") from error
        return text

    def _check(self) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            text = self._render(_with_content(PROBE, 1, _placeholder("")))
        except BadChat as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ConfigError(f"the chat template of {self.name} is no valid Jinja ({error.__cause__}).") from error
            return  # one that does not like this chat, such as one that wants a system message; others may do
        if _placeholder("") not in text:
            raise ConfigError(
                f"the chat template of {self.name} writes nothing of what the assistant says, so no token would be trained; "
                "give another with --template."
            )

    def _check_nothing_is_left_out(self, chat: Chat, text: str) -> None:
        if chat.tools and self._render(chat.messages) == text:
            raise BadChat(f"the chat template of {self.name} knows no tools and leaves them out")
        roles = tuple(message["role"] for message in chat.messages if message["content"])
        if roles in self._complete:
            return
        marked = list(chat.messages)
        marks = {k: f"{_placeholder(text)}{k}x" for k, message in enumerate(chat.messages) if message["content"]}
        for k, mark in marks.items():
            marked[k] = {**marked[k], "content": mark}
        try:
            written = self._render(marked, chat.tools)
        except BadChat:
            return  # a template that reads what messages say, and does not like these
        for k, mark in marks.items():
            if mark not in written:
                role = chat.messages[k]["role"]
                raise BadChat(f"the chat template of {self.name} leaves out message {k + 1}, of the role {role}")
        self._complete.add(roles)

    def _place(self, chat: Chat, k: int, text: str) -> tuple[int, int, bool]:
        """Return where in `text` the content of message k begins, where its end of turn ends, and whether it has one."""
        mark = _placeholder(text)
        try:
            before, after = self._around(_with_content(chat.messages, k, mark), chat, mark)
        except BadChat:  # such as a tool's answer to a call that the placeholder does not make
            return self._place_by_prefixes(chat, k, text)
        start, stop = len(before), len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and start <= stop):
            return self._place_by_prefixes(chat, k, text)
        message = chat.messages[k]
        if "tool_calls" in message and text[start:stop].strip() == message["content"].strip():
            raise BadChat(f"the chat template of {self.name} leaves out the tool calls of message {k + 1}")
        tail = after
        if k + 1 < len(chat.messages):
            _, at_the_end = self._around(_with_content(chat.messages[: k + 1], k, mark), chat, mark)
            tail = _common_beginning(after, at_the_end)
            if self._has_added_token(at_the_end) and not self._has_added_token(tail):
                return start, stop, False  # only the last turn of a conversation is ended
        length = self._length_of_end(tail)
        return start, stop + length, length > 0

    def _around(self, messages: Sequence[Message], chat: Chat, mark: str) -> tuple[str, str]:
        written = self._render(messages, chat.tools)
        if written.count(mark) != 1:
            raise BadChat(
                f"the chat template of {self.name} writes an assistant's message {written.count(mark)} times, not once"
            )
        before, _, after = written.partition(mark)
        return before, after

    def _place_by_prefixes(self, chat: Chat, k: int, text: str) -> tuple[int, int, bool]:
        header = self._render(chat.messages[:k], chat.tools, add_generation_prompt=True)
        until = self._render(chat.messages[: k + 1], chat.tools)
        if not (text.startswith(until) and until.startswith(header)):
            raise BadChat(
                f"the chat template of {self.name} writes message {k + 1} differently once others follow, so that its place "
                "cannot be told; use a template that does not change earlier turns"
            )
        mark = _placeholder(text)
        _, tail = self._around(_with_content(chat.messages[: k + 1], k, mark), chat, mark)
        if until.endswith(tail) and len(header) + len(tail) <= len(until):
            length = self._length_of_end(tail)
            return len(header), len(until) - len(tail) + length, length > 0
        # A turn with an end of its own, such as Llama-3.1's <|eom_id|> behind a call: the special token that it ends with.
        stop = len(until.rstrip())
        last = [found.end() for found in self._added.finditer(until)][-1:] if self._added is not None else []
        return len(header), stop, last == [stop]

    def _length_of_end(self, tail: str) -> int:
        found = self._added.search(tail) if self._added is not None else None
        return found.end() if found else len(tail.rstrip()) or len(tail)

    def _has_added_token(self, text: str) -> bool:
        return self._added is not None and self._added.search(text) is not None

    def _tokenize(self, text: str, places: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and, for each half-open range of characters, the range of the tokens that touch it."""
        if self._fast is None:
            ids = self._ids(text)
            return ids, [(self._border(text, ids, start), self._border(text, ids, stop)) for start, stop in places]
        ids, offsets = self._fast([text])
        return ids, tokens_touching(offsets, places)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _border(self, text: str, ids: list[int], position: int) -> int:
        """Return the token that begins at a character, of a tokenizer without offsets."""
        before = self._ids(text[:position])
        if ids[: len(before)] != before:
            raise BadChat(
                f"the tokenizer of {self.name} tells no character offsets, and joins the header or the end of a turn with what is "
                "beside it, so that its place cannot be told"
            )
        return len(before)


def load_hugging_face(path: Path, opened: Tokenizer, name: str, template: str | None) -> HuggingFaceTemplate:
    """Open a tokenizer.json with `transformers`, and a chat template: one of ours by its name, a file in Jinja, None: its own.

    One that brings none gets DEFAULT_TEMPLATE, with a notice. opened: the same tokenizer; ours write its beginning and end of text.

    Raises:
        ConfigError: transformers is not installed or cannot open it, or it does not fit the template.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"--tokenizer {name}: chats need transformers with a Hugging Face tokenizer; pip install transformers."
        ) from error
    try:
        if path.name == "tokenizer.json":
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # it raises whatever its parts do
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--tokenizer {name}: transformers cannot open it ({told}).") from error
    notice = ""
    if template is None and not tokenizer.chat_template:
        template = DEFAULT_TEMPLATE
        notice = f"the tokenizer brings no chat template, so it is {template}; --template names another"
    if template in MARKUPS:
        jinja = jinja_of(template, opened)
        return HuggingFaceTemplate(tokenizer, template, jinja, notice)
    if template is not None:
        return HuggingFaceTemplate(tokenizer, template, Path(template).read_text(encoding="utf-8"))
    return HuggingFaceTemplate(tokenizer, name)


def _with_content(messages: Sequence[Message], k: int, content: str) -> list[Message]:
    """Return the messages with message k saying `content` alone: no calls, no thoughts."""
    return [*messages[:k], {"role": messages[k]["role"], "content": content}, *messages[k + 1 :]]


def _common_beginning(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _placeholder(text: str) -> str:
    """Return a word that is not in `text`."""
    number = 0
    while (mark := f"placeholder{number}x") in text:
        number += 1
    return mark


def _added_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    names = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    longest_first = sorted(filter(None, names), key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
