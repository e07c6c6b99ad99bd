"""From options to rows of chats, in one call."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.data.chat.encoder import load_chat_encoder
from parallax.data.chat.options import ChatOptions, ChatSource, check, parse_sources
from parallax.data.chat.samples import ChatSamples, Chosen, fit, hold_out, mix
from parallax.data.chat.store import chat_store
from parallax.data.packing import RowDataset
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError


@dataclass(frozen=True)
class PreparedChats:
    """What a run is fine-tuned on; `eval` is None if nothing is held out. `description` is a line for the user.

    Item i of `train` and `eval` is a row as `parallax.data.packing.make_row` returns it. `tokenizer` is saved with the chat
    template.
    """

    train: RowDataset
    eval: RowDataset | None
    tokenizer: Tokenizer
    description: str


def prepare_chats(options: ChatOptions, seq_len: int) -> PreparedChats:
    """Read, encode, check, split and pack the chats; what is encoded is cached for the next run.

    Every rank calls it, before there is a process group: the first on each file system builds, the others wait for it.

    Raises:
        ConfigError: a file, a chat, the tokenizer or the template cannot be used, or no chat is left.
    """
    if problems := check(options):
        raise ConfigError(problems)
    tokenizer, encoder = load_chat_encoder(options.tokenizer, options.template)
    sources = parse_sources(options.data)
    paths: list[str | None] = [source.path for source in sources] or [None]
    stores = [chat_store(path, encoder, options.train_on, options.skip_bad) for path in paths]
    chosen = [fit(store, seq_len, options.too_long) for store in stores]
    _check_some_are_left(chosen, seq_len)
    parts = [hold_out(part, options.eval_fraction) for part in chosen]
    held_out = [part for _, part in parts]
    if options.eval_fraction and not any(len(part.indices) for part in held_out):
        raise ConfigError(
            "the data holds too few different chats to hold one out; give more, or use --eval-fraction 0."
        )
    padding_id = tokenizer.eos_id or 0  # any id will do: padding is no label, and nothing attends to it
    shares = [source.share for source in sources] or [None]
    train = ChatSamples(mix([part for part, _ in parts], shares), options.loss_per == "sample")
    rows = RowDataset(train, seq_len, padding_id, options.packing)
    evaluation = None
    if options.eval_fraction:
        samples = ChatSamples(held_out, options.loss_per == "sample")
        evaluation = RowDataset(samples, seq_len, padding_id, options.packing)
    description = _describe(sources, chosen, train, rows, evaluation, encoder.name)
    return PreparedChats(
        rows, evaluation, tokenizer, f"{description}; {tokenizer.description}, {tokenizer.vocab_size:,} ids"
    )


def _check_some_are_left(chosen: list[Chosen], seq_len: int) -> None:
    if any(len(part.indices) for part in chosen):
        return
    number = sum(len(part.store) for part in chosen)
    shortest = min(int((part.store.starts[1:] - part.store.starts[:-1]).min()) for part in chosen)
    raise ConfigError(
        f"none of the {number:,} chats is left: with --seq-len {seq_len} each is too long (the shortest has {shortest:,} tokens) "
        "or is cut before the first token to be learned; raise --seq-len."
    )


def _describe(
    sources: list[ChatSource],
    chosen: list[Chosen],
    samples: ChatSamples,
    rows: RowDataset,
    evaluation: RowDataset | None,
    template: str,
) -> str:
    names = " ".join(source.path for source in sources) or "the functions of Python's standard library"
    left_out = {
        "too long and dropped": sum(part.num_dropped for part in chosen),
        "cut": sum(part.num_cut for part in chosen),
        "unusable and left out": sum(part.store.num_bad for part in chosen),
    }
    told = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)
    held = len(evaluation.samples.lengths) if evaluation is not None else 0
    return (
        f"{names}: {sum(len(part.store) for part in chosen):,} chats{told}; {len(samples.lengths):,} in an epoch with "
        f"{rows.num_tokens:,} tokens, {samples.num_labels:,} of them learned, in {len(rows):,} rows "
        f"that are {rows.filled:.1%} full; {held:,} held out; template {template}"
    )
