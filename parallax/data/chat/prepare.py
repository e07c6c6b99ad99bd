"""From options to rows of chats, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from parallax.data.blend import BlendedDataset
from parallax.data.chat.encoder import load_chat_encoder, notice_of_ids, problem_of_ids
from parallax.data.chat.options import ChatOptions, check
from parallax.data.chat.samples import ChatSamples, Chosen, fit, hold_out
from parallax.data.chat.store import chat_store
from parallax.data.checksums import DataFile
from parallax.data.packing import RowDataset
from parallax.data.sources import DataSource, parse_data
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError

Rows = RowDataset | BlendedDataset[dict[str, np.ndarray]]


@dataclass(frozen=True)
class PreparedChats:
    """What a run is fine-tuned on; `eval` is None if nothing is held out.

    Item i of `train` and `eval` is a row as `parallax.data.packing.make_row` returns it. tokenizer: saved with the chat template.
    description: a line for the user. files: of the chats, and their checksums. notices: what the user should know before the
    run, a line each.
    """

    train: Rows
    eval: Rows | None
    tokenizer: Tokenizer
    description: str
    files: tuple[DataFile, ...] = ()
    notices: tuple[str, ...] = ()

    def evaluated(self) -> list[tuple[str, Rows, bool]]:
        """Return what is evaluated, as `PreparedData.evaluated` does."""
        return [] if self.eval is None else [("eval_loss", self.eval, False)]


def prepare_chats(
    options: ChatOptions, seq_len: int, vocab_size: int | None = None, family: str | None = None
) -> PreparedChats:
    """Read, encode, check, split and pack the chats; what is encoded is cached for the next run.

    vocab_size, family: how many ids the model has, and its model_type; None: there is no model to fit to.

    Every rank calls it, before there is a process group: the first on each file system builds, the others wait for it.

    Raises:
        ConfigError: a file, a chat, the tokenizer or the template cannot be used, or no chat is left.
    """
    if problems := check(options):
        raise ConfigError(problems)
    tokenizer, encoder = load_chat_encoder(options.tokenizer, options.template)
    if vocab_size is not None and (problem := problem_of_ids(tokenizer, encoder, vocab_size)):
        raise ConfigError(problem)
    sources: Sequence[DataSource] = parse_data(options.data)
    paths: list[list[str | None]] = [list(source.paths) for source in sources] or [[None]]
    weights = [source.weight or Fraction(1) for source in sources] or [Fraction(1)]
    stores = [[chat_store(path, encoder, options.train_on, options.skip_bad) for path in group] for group in paths]
    chosen = [[fit(store, seq_len, options.too_long) for store in group] for group in stores]
    for group in chosen:
        _check_some_are_left(group, seq_len)
    split = iter(hold_out([part for group in chosen for part in group], options.eval_fraction))
    parts = [[next(split) for _ in group] for group in chosen]
    per_sample = options.loss_per == "sample"
    has_weights = per_sample or any(store.has_weights for group in stores for store in group)
    padding_id = tokenizer.eos_id or 0  # any id will do: padding is no label, and nothing attends to it

    def rows_of(groups: list[list[Chosen]]) -> list[RowDataset]:
        samples = [ChatSamples(group, per_sample, has_weights) for group in groups]
        return [RowDataset(one, seq_len, padding_id, options.packing) for one in samples]

    train = rows_of([[part for part, _ in group] for group in parts])
    held_out = rows_of([[part for _, part in group] for group in parts])
    if options.eval_fraction and not any(len(rows) for rows in held_out):
        raise ConfigError(
            "the data holds too few different chats to hold one out; give more, or use --eval-fraction 0."
        )
    names = " ".join(options.data) or stores[0][0].source
    all_chosen = [part for group in chosen for part in group]
    why = ", since the tokenizer brings none" if encoder.notice else ""
    description = (
        f"{names}: {_describe(all_chosen, train, held_out)}; template {encoder.name}{why}; {tokenizer.description}, "
        f"{tokenizer.vocab_size:,} ids"
    )
    joined = _join(train, weights)
    assert joined is not None
    files = tuple(file for group in stores for store in group for file in store.files)
    notices = tuple(filter(None, [notice_of_ids(tokenizer, encoder, family)]))
    return PreparedChats(joined, _join(held_out, weights), tokenizer, description, files, notices)


def _join(rows: Sequence[RowDataset], weights: Sequence[Fraction]) -> Rows | None:
    """Return the rows of all sources as one data set; None if there are none."""
    some = [(one, weight) for one, weight in zip(rows, weights, strict=True) if len(one)]
    if len(some) < 2:
        return some[0][0] if some else None
    return BlendedDataset([one for one, _ in some], [weight for _, weight in some])


def _check_some_are_left(group: Sequence[Chosen], seq_len: int) -> None:
    if any(len(part.indices) for part in group):
        return
    names, number = " ".join(part.store.source for part in group), sum(len(part.store) for part in group)
    shortest = min(int(np.diff(part.store.starts).min()) for part in group)
    raise ConfigError(
        f"none of the {number:,} chats of {names} is left: with --seq-len {seq_len} each is too long (the shortest has "
        f"{shortest:,} tokens) or is cut before the first token to be learned; raise --seq-len."
    )


def _describe(chosen: Sequence[Chosen], train: Sequence[RowDataset], held_out: Sequence[RowDataset]) -> str:
    left_out = {
        "too long and dropped": sum(part.num_dropped for part in chosen),
        "cut": sum(part.num_cut for part in chosen),
        "unusable and left out": sum(part.store.num_bad for part in chosen),
    }
    told = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)
    num_rows, tokens = sum(map(len, train)), sum(rows.num_tokens for rows in train)
    filled = tokens / (num_rows * train[0].seq_len)
    labels = sum(rows.num_labels for rows in train)
    return (
        f"{sum(len(part.store) for part in chosen):,} chats{told}; {sum(rows.num_samples for rows in train):,} to train on with "
        f"{tokens:,} tokens, {labels:,} of them learned, in {num_rows:,} rows that are {filled:.1%} full; "
        f"{sum(rows.num_samples for rows in held_out):,} held out"
    )
