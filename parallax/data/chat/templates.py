"""Chat templates of our own, for tokenizers that bring none: ChatML, Llama-3's, and a plain one.

              header                                       content   end of turn   between
    chatml    <|im_start|>assistant\\n                      hello     <|im_end|>    \\n
    llama3    <|start_header_id|>assistant<|end_header_id|>\\n\\n   hello   <|eot_id|>
    plain     Assistant:\\n                                 hello     </s>          \\n\\n
                                                           └────── trained ──────┘

Each is a function here, which knows the place of every character that it writes, and the same in Jinja, for checkpoints and for the
tokenizers that `transformers` opens. Where the tokenizer has a beginning of text, each chat begins with one. Nothing is stripped. A
marker that the vocabulary has is one token; in another vocabulary it is spelled out.

Sources: ChatML, openai-python's chatml.md (2023); the Llama 3 model card's prompt format (2024); tool calls in ChatML as Hermes and
Qwen2.5 write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parallax.data.cache import digest
from parallax.data.chat.encoded import EncodedChat, Turn
from parallax.data.chat.marked_text import encoder_of, tokens_touching
from parallax.data.chat.records import BadChat, Chat, Message
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError

FORMAT_VERSION = 2
DEFAULT_TEMPLATE = "chatml"  # of tokenizers that bring none


@dataclass(frozen=True)
class Markup:
    """What a template writes around the content of a message; `{role}` in `header` is `roles`' word for its role.

    end: the end of a turn of the assistant; None: the tokenizer's end of text. end_of_others: that of other roles.
    between: what follows either, never trained. jinja: the same template for `transformers`, with BOS and EOS for literals.
    """

    header: str
    end: str | None
    end_of_others: str
    between: str
    roles: dict[str, str]
    knows_tools: bool
    jinja: str


_TOOLS_BEFORE = "You can call these functions:\n"
_TOOLS_AFTER = 'To call one, write <tool_call>, a line with an object of its "name" and "arguments", and </tool_call>.'
_PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}

MARKUPS = {
    "chatml": Markup(
        header="<|im_start|>{role}\n",
        end="<|im_end|>",
        end_of_others="<|im_end|>",
        between="\n",
        roles={role: role for role in _PLAIN_ROLES},
        knows_tools=True,
        jinja="""\
{{- BOS }}
{%- set told %}"""
        + _TOOLS_BEFORE
        + """<tools>
{% for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}</tools>
"""
        + _TOOLS_AFTER
        + """{% endset %}
{%- if tools and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n' + told + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- if loop.first and tools and message['role'] == 'system' %}{{ '\\n\\n' + told }}{% endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if message['content'] or not loop.first else '' }}
{{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    ),
    "llama3": Markup(
        header="<|start_header_id|>{role}<|end_header_id|>\n\n",
        end="<|eot_id|>",
        end_of_others="<|eot_id|>",
        between="",
        roles={role: role for role in _PLAIN_ROLES},
        knows_tools=False,
        jinja="""\
{{- BOS }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    ),
    "plain": Markup(
        header="{role}:\n",
        end=None,
        end_of_others="",
        between="\n\n",
        roles=_PLAIN_ROLES,
        knows_tools=False,
        jinja="""\
{{- BOS }}
{%- for message in messages %}
{{- (message['role'] | capitalize) + ':\\n' + message['content'] }}
{{- (EOS if message['role'] == 'assistant' else '') + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}""",
    ),
}


def jinja_of(name: str, tokenizer: Tokenizer) -> str:
    """Return one of MARKUPS as Jinja, with how the vocabulary writes its beginning and end of text in it.

    They are literals, for `transformers` gives some tokenizers special tokens that their files do not name.

    Raises:
        ConfigError: the template ends turns with the end of text and the tokenizer has none.
    """
    if MARKUPS[name].end is None and tokenizer.eos_id is None:
        raise ConfigError(
            f"--template {name} ends turns with the end-of-text token, but {tokenizer.description} has none; use --template "
            "chatml."
        )
    bos, eos = _special_names(tokenizer)
    literals = {"BOS": json.dumps(bos), "EOS": json.dumps(eos)}
    return re.sub(r"\b[BE]OS\b", lambda found: literals[found[0]], MARKUPS[name].jinja)


def _special_names(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return how the vocabulary writes the beginning and the end of text; "" where there is none."""
    bos, eos = ("" if i is None else tokenizer.token_name(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return bos, eos


class OwnTemplate:
    """One of MARKUPS with a tokenizer; a `ChatEncoder`.

    Raises:
        ConfigError: the template ends turns with the end of text and the tokenizer has none.
    """

    notice = ""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.markup = MARKUPS[name]
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._encode = encoder_of(tokenizer)
        self._bos, self._eos = _special_names(tokenizer)
        self.template: str | None = jinja_of(name, tokenizer)
        self.fingerprint = digest("own template", str(FORMAT_VERSION), repr(self.markup), tokenizer.fingerprint)

    def encode(self, chat: Chat) -> EncodedChat:
        parts, places = self._write(chat)
        ids, offsets = self._encode(parts)
        borders = tokens_touching(offsets, places)
        turns = (Turn(k, *border, ends=True) for k, border in zip(chat.assistant_turns, borders, strict=True))
        return EncodedChat(ids, tuple(turns))

    def prompt(self, chat: Chat) -> list[int]:
        return self._encode([*self._write(chat)[0], self._header("assistant")])[0]

    def _write(self, chat: Chat) -> tuple[list[str], list[tuple[int, int]]]:
        """Return the parts of the chat as text, and where the assistant's contents and their ends of turn stand in it."""
        parts, places, length = [self._bos], [], len(self._bos)
        for role, content in self._turns(chat):
            header, end = self._header(role), self._end(role)
            start = length + len(header)
            stop = start + len(content) + len(end)
            if role == "assistant":
                places.append((start, stop))
            parts += [header, content, end, self.markup.between]
            length = stop + len(self.markup.between)
        return parts, places

    def _header(self, role: str) -> str:
        return self.markup.header.format(role=self.markup.roles[role])

    def _end(self, role: str) -> str:
        if role != "assistant":
            return self.markup.end_of_others
        return self._eos if self.markup.end is None else self.markup.end

    def pieces(self, ids: Sequence[int]) -> list[str]:
        texts = [self.tokenizer.decode([i]) for i in ids]
        whole = (text and "\ufffd" not in text for text in texts)
        return [text if good else self.tokenizer.token_name(i) for i, text, good in zip(ids, texts, whole, strict=True)]

    def _turns(self, chat: Chat) -> Iterator[tuple[str, str]]:
        """Yield (role, text) of what is written."""
        calls = any("tool_calls" in message for message in chat.messages)
        if (chat.tools or calls) and not self.markup.knows_tools:
            raise BadChat(f"the template {self.name} knows no tools and would drop them; chatml does")
        tools = _describe_tools(chat.tools) if chat.tools else ""
        if tools and chat.messages[0]["role"] != "system":
            yield "system", tools
        for k, message in enumerate(chat.messages):
            content = message["content"]
            if tools and k == 0 and message["role"] == "system":
                content += "\n\n" + tools
            yield message["role"], "\n".join([*([content] if content else []), *map(_call, _calls(message))])


def _calls(message: Message) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _call(call: dict[str, Any]) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return f"{_TOOLS_BEFORE}<tools>\n{lines}</tools>\n{_TOOLS_AFTER}"
