"""A chat as token ids, with the place of every turn of the assistant; and from that what the loss is taken of.

<|im_start|> user \n  hi <|im_end|> \n <|im_start|> assistant \n  hel lo <|im_end|> \n
                                                                  └───── turn ────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from parallax.data.chat.records import BadChat, Chat

TrainOn = Literal["last", "all", "full"]


@dataclass(frozen=True)
class Turn:
    """Tokens start .. stop - 1 are the content of an assistant's message and its end of turn.

    message: which one. ends: the template wrote an end of turn behind the content.
    """

    message: int
    start: int
    stop: int
    ends: bool


@dataclass(frozen=True)
class EncodedChat:
    """The ids of a rendered chat, and the turns of the assistant in it, in order."""

    input_ids: list[int]
    turns: tuple[Turn, ...]


class ChatEncoder(Protocol):
    """A tokenizer and a chat template together. `name` and `fingerprint` are the template's, `vocab_size` is the tokenizer's.

    template: the same as jinja, for `transformers`; None where the tokenizer's own files hold it. notice: why it is this template,
    where nobody asked for it and the user should know.
    """

    name: str
    vocab_size: int
    notice: str
    fingerprint: str
    template: str | None

    def encode(self, chat: Chat) -> EncodedChat:
        """Return the chat as ids.

        Raises:
            BadChat: the template cannot write this chat, or it cannot be told where a turn of the assistant stands.
            ConfigError: the template never writes what the assistant says.
        """

    def prompt(self, chat: Chat) -> list[int]:
        """Return the ids of the chat followed by the header of an assistant's turn, for generation."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token as text, for people to look at."""


def token_weights(encoded: EncodedChat, chat: Chat, train_on: TrainOn, template: str) -> np.ndarray:
    """Return what the loss of each token counts, float32 `[tokens]`, not shifted: 0 where it is not trained.

    all: every turn of the assistant. last: its last one alone. full: everything, headers and the user too. `template` is named in
    errors.

    Raises:
        BadChat: a turn to be trained has no token, no end of turn, or the weight of the last turn is 0.
    """
    weights = np.full(len(encoded.input_ids), train_on == "full", dtype=np.float32)
    turns = encoded.turns[-1:] if train_on == "last" else encoded.turns
    for turn in turns:
        weight = chat.weights[turn.message]
        weights[turn.start : turn.stop] = weight
        if weight and not turn.ends and train_on != "full":
            raise BadChat(
                f"the chat template of {template} writes no end of turn behind message {turn.message + 1}, or only white space, "
                "which answers hold too, so the model would not learn to stop"
            )
        if weight and turn.start == turn.stop:
            raise BadChat(f"the chat template of {template} gives message {turn.message + 1} no token to learn")
    if not weights[1:].any():
        raise BadChat("no token is trained: the turns to be learned have weight 0")
    return weights


def spans(weights: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of trained tokens as half-open ranges."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], weights > 0, [False]])))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
