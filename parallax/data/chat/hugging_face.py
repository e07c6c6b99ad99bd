"""Chat templates of Hugging Face tokenizers, and where the assistant's turns stand in what they write.

A template is a program: nobody but the template knows where it puts a message, and it may strip, rewrite or leave out what it is
given. So each chat is written once more for each turn, with a placeholder in the turn's place:

    written            <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n<|im_start|>user\\nbye...
    with placeholder   <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n  X  <|im_end|>\\n<|im_start|>user\\nbye...
                       └───────────────── before ────────────────────────┘     └──────────── after ────────────────┘

If the written chat begins with `before` and ends with `after`, what lies between them is the turn's content, to the character,
however the template changed it. If it does not (a thought that only the last turn keeps), the turn lies between the chats written
up to it, with and without it; if those are not prefixes of the whole either, the chat is refused. The end of turn is what the
template writes behind the content whatever follows, so both where the conversation ends and where it goes on: up to its first
special token, or, without one, all of it but white space at its end. White space alone is no end: an answer may hold it, too.

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
from parallax.data.chat.left_out import CompletenessCheck, placeholder
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
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._special = _special_tokens(tokenizer)
        core = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None
        self._fast = with_fast_tokenizer(core) if core is not None else None
        self._check_complete = CompletenessCheck(self._render, name)
        texts = (template or tokenizer.chat_template, tokenizer.special_tokens_map)
        vocabulary = core or json.dumps(tokenizer.get_vocab(), sort_keys=True)
        self.fingerprint = digest("hugging face template", json.dumps(texts, default=str, sort_keys=True), vocabulary)
        self._check()

    def encode(self, chat: Chat) -> EncodedChat:
        text = self._render(chat.messages, chat.tools)
        self._check_complete(chat, text)
        places = [(k, *self._place(chat, k, text)) for k in chat.assistant_turns]
        ids, borders = self._tokenize(text, [(start, stop) for _, start, stop, _ in places])
        turns = [Turn(k, *border, ends) for (k, _, _, ends), border in zip(places, borders, strict=True)]
        return EncodedChat(ids, tuple(turns))

    def prompt(self, chat: Chat) -> list[int]:
        return self.ids(self._render(chat.messages, chat.tools, add_generation_prompt=True))

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text that was written by a template."""
        return self._tokenize(text, [])[0]

    def sample(self) -> str:
        """Return a short chat as the template writes it; "" if it does not like that one."""
        try:
            return self._render(PROBE)
        except BadChat:
            return ""

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
            text = self._render(_with_content(PROBE, 1, placeholder("")))
        except BadChat as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ConfigError(f"the chat template of {self.name} is no valid Jinja ({error.__cause__}).") from error
            return  # one that does not like this chat, such as one that wants a system message; others may do
        if placeholder("") not in text:
            raise ConfigError(
                f"the chat template of {self.name} writes nothing of what the assistant says, so no token would be trained; "
                "give another with --template."
            )

    def _place(self, chat: Chat, k: int, text: str) -> tuple[int, int, bool]:
        """Return where in `text` the content of message k begins, where its end of turn ends, and whether it has one."""
        mark = placeholder(text)
        try:
            before, after = self._around(_with_content(chat.messages, k, mark), chat.tools, mark)
        except BadChat:  # such as a tool's answer to a call that the placeholder does not make
            return self._place_by_prefixes(chat, k, text)
        start, stop = len(before), len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and start <= stop):
            return self._place_by_prefixes(chat, k, text)
        message = chat.messages[k]
        if "tool_calls" in message and text[start:stop].strip() == message["content"].strip():
            raise BadChat(f"the chat template of {self.name} leaves out the tool calls of message {k + 1}")
        end = self._end_of_turn(chat, k, mark, after)
        return start, stop + len(end), bool(end)

    def _end_of_turn(self, chat: Chat, k: int, mark: str, after: str) -> str:
        """Return what the template writes behind the content of message k whatever follows; "" where that is white space alone.

        after: what it writes there in this chat.
        """
        until = _with_content(chat.messages[: k + 1], k, mark)
        is_last = k + 1 == len(chat.messages)
        at_the_end = after if is_last else self._around(until, chat.tools, mark)[1]
        found = self._special.search(at_the_end)
        if is_last and found and not (at_the_end[: found.start()] + at_the_end[found.end() :]).strip():
            return at_the_end[: found.end()]  # nothing but a special token: no need to see how the chat would go on
        follows = after
        if is_last:
            follows = self._around([*until, {"role": "user", "content": "so"}], chat.tools, mark)[1]
        end = self._common_beginning(at_the_end, follows)
        if len(end) < len(at_the_end):
            # What the template puts last, such as the system's words, may begin like what follows.
            bare = [message for message in until if message["role"] != "system"]
            try:
                end = self._common_beginning(end, self._around(bare, (), mark)[1])
            except BadChat:
                pass
        if ends := self._special.search(end):
            return end[: ends.end()]
        if not end.strip() and is_last and found:
            return at_the_end[: found.end()]  # a template that ends the last turn of a chat alone
        return end.rstrip()

    def _around(self, messages: Sequence[Message], tools: Sequence[Any], mark: str) -> tuple[str, str]:
        written = self._render(messages, tools)
        if written.count(mark) != 1:
            raise BadChat(
                f"the chat template of {self.name} writes an assistant's message {written.count(mark)} times, not once"
            )
        before, _, after = written.partition(mark)
        return before, after

    def _place_by_prefixes(self, chat: Chat, k: int, text: str) -> tuple[int, int, bool]:
        header = self._render(chat.messages[:k], chat.tools, add_generation_prompt=True)
        until = self._render(chat.messages[: k + 1], chat.tools)
        if not text.startswith(until):
            raise BadChat(
                f"the chat template of {self.name} writes message {k + 1} differently once others follow, so that its place "
                "cannot be told; use a template that does not change earlier turns"
            )
        if not until.startswith(header):
            raise BadChat(
                f"the chat template of {self.name} writes before message {k + 1} something else than before an answer that is yet "
                "to be given, and what it is depends on the message, so that its place cannot be told; use a template that begins "
                "each turn of the assistant as it ends a prompt (add_generation_prompt)"
            )
        mark = placeholder(text)
        _, tail = self._around(_with_content(chat.messages[: k + 1], k, mark), chat.tools, mark)
        if until.endswith(tail) and len(header) + len(tail) <= len(until):
            end = self._end_of_turn(chat, k, mark, text[len(until) - len(tail) :])
            return len(header), len(until) - len(tail) + len(end), bool(end)
        # A turn with an end of its own, such as Llama-3.1's <|eom_id|> behind a call: the special token that it ends with.
        stop = len(until.rstrip())
        last = [found.end() for found in self._special.finditer(until)][-1:]
        return len(header), stop, last == [stop]

    def _common_beginning(self, a: str, b: str) -> str:
        """Return the longest text that both begin with, and that ends inside of no special token of either."""
        length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        cut = [found.start() for text in (a, b) for found in self._special.finditer(text) if found.end() > length]
        return a[: min([length, *cut])]

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


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return what finds the names of special tokens; tokens that were added as ordinary words, such as a line end, mark nothing."""
    names = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted(filter(None, names | set(tokenizer.all_special_tokens)), key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
