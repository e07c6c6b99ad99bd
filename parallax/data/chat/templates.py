"""Chat templates of our own, for tokenizers that bring none: ChatML, Llama-3's, and a plain one.

              header                                       content   end of turn   between
    chatml    <|im_start|>assistant\\n                      hello     <|im_end|>    \\n
    llama3    <|start_header_id|>assistant<|end_header_id|>\\n\\n   hello   <|eot_id|>
    plain     Assistant:\\n                                 hello     </s>          \\n\\n
                                                           └────── trained ──────┘

Header, content and end of turn are encoded one by one and put side by side, so that no token reaches over a border: what is trained
is exactly what the assistant says, and a prompt for generation has the ids that it had in training. A marker that the vocabulary
has as one token becomes that token; in another vocabulary it is written out, in several. Where the tokenizer has a beginning of
text, each chat begins with one. Nothing is stripped.

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
from parallax.data.chat.records import BadChat, Chat, Message
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Markup:
    """What a template writes around the content of a message; `{role}` in `header` is `roles`' word for its role.

    end: the end of a turn of the assistant; None: the tokenizer's end of text. end_of_others: that of other roles.
    between: what follows either, never trained. markers: matches what is one token where the vocabulary has it.
    jinja: the same template for `transformers`.
    """

    header: str
    end: str | None
    end_of_others: str
    between: str
    markers: str
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
        markers=r"<\|im_start\|>|<\|im_end\|>",
        roles={role: role for role in _PLAIN_ROLES},
        knows_tools=True,
        jinja="""\
{{- bos_token if bos_token is defined and bos_token else '' }}
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
        markers=r"<\|start_header_id\|>|<\|end_header_id\|>|<\|eot_id\|>",
        roles={role: role for role in _PLAIN_ROLES},
        knows_tools=False,
        jinja="""\
{{- bos_token if bos_token is defined and bos_token else '' }}
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
        markers=r"(?!)",
        roles=_PLAIN_ROLES,
        knows_tools=False,
        jinja="""\
{{- bos_token if bos_token is defined and bos_token else '' }}
{%- for message in messages %}
{{- (message['role'] | capitalize) + ':\\n' + message['content'] }}
{{- (eos_token if message['role'] == 'assistant' else '') + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}""",
    ),
}


class OwnTemplate:
    """One of MARKUPS with a tokenizer; a `ChatEncoder`.

    Raises:
        ConfigError: the template ends turns with the end of text and the tokenizer has none.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.markup = MARKUPS[name]
        self.tokenizer = tokenizer
        self.template: str | None = self.markup.jinja
        self.fingerprint = digest("own template", str(FORMAT_VERSION), repr(self.markup), tokenizer.fingerprint)
        if self.markup.end is None and tokenizer.eos_id is None:
            raise ConfigError(
                f"--template {name} ends turns with the end-of-text token, but {tokenizer.description} has none; "
                "use --template chatml."
            )

    def encode(self, chat: Chat) -> EncodedChat:
        parts = self._beginning()
        places: list[tuple[int, int, int]] = []  # message, its first part, one past its last
        for k, role, content in self._turns(chat):
            parts += self._header(role)
            first = len(parts)
            parts += [content, *self._end(role)]
            if role == "assistant":
                places.append((k, first, len(parts)))
            parts += self._marked(self.markup.between)
        encoded = self._encode(parts)
        starts = [0]
        for ids in encoded:
            starts.append(starts[-1] + len(ids))
        turns = tuple(Turn(k, starts[first], starts[last], ends=True) for k, first, last in places)
        return EncodedChat([i for ids in encoded for i in ids], turns)

    def prompt(self, chat: Chat) -> list[int]:
        parts = self._beginning()
        for _, role, content in self._turns(chat):
            parts += [*self._header(role), content, *self._end(role), *self._marked(self.markup.between)]
        return [i for ids in self._encode([*parts, *self._header("assistant")]) for i in ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        texts = [self.tokenizer.decode([i]) for i in ids]
        whole = (text and "\ufffd" not in text for text in texts)
        return [text if good else self.tokenizer.token_name(i) for i, text, good in zip(ids, texts, whole, strict=True)]

    def _turns(self, chat: Chat) -> Iterator[tuple[int, str, str]]:
        """Yield (index of the message, role, text) of what is written; -1 is a message that tells of the tools."""
        calls = any("tool_calls" in message for message in chat.messages)
        if (chat.tools or calls) and not self.markup.knows_tools:
            raise BadChat(f"the template {self.name} knows no tools and would drop them; chatml does")
        tools = _describe_tools(chat.tools) if chat.tools else ""
        if tools and chat.messages[0]["role"] != "system":
            yield -1, "system", tools
        for k, message in enumerate(chat.messages):
            content = message["content"]
            if tools and k == 0 and message["role"] == "system":
                content += "\n\n" + tools
            yield k, message["role"], "\n".join([*([content] if content else []), *map(_call, _calls(message))])

    def _beginning(self) -> list[str | int]:
        return [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]

    def _header(self, role: str) -> list[str | int]:
        return self._marked(self.markup.header.format(role=self.markup.roles[role]))

    def _end(self, role: str) -> list[str | int]:
        if role != "assistant":
            return self._marked(self.markup.end_of_others)
        if self.markup.end is not None:
            return self._marked(self.markup.end)
        assert self.tokenizer.eos_id is not None
        return [self.tokenizer.eos_id]

    def _marked(self, text: str) -> list[str | int]:
        """Return a text with the markers that the vocabulary has as their ids."""
        parts: list[str | int] = []
        for piece in filter(None, re.split(f"({self.markup.markers})", text)):
            known = self.tokenizer.token_id(piece) if re.fullmatch(self.markup.markers, piece) else None
            if known is not None:
                parts.append(known)
            elif parts and isinstance(parts[-1], str):
                parts[-1] += piece
            else:
                parts.append(piece)
        return parts

    def _encode(self, parts: Sequence[str | int]) -> list[list[int]]:
        """Return the ids of each part, all texts of a chat in one call."""
        texts = iter(self.tokenizer.encode_batch([part for part in parts if isinstance(part, str)]))
        return [next(texts).tolist() if isinstance(part, str) else [part] for part in parts]


def _calls(message: Message) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _call(call: dict[str, Any]) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return f"{_TOOLS_BEFORE}<tools>\n{lines}</tools>\n{_TOOLS_AFTER}"
