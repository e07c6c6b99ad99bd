"""From options to data sets, in one call."""

from __future__ import annotations

from dataclasses import dataclass

from parallax.data.corpus import standard_library, user_corpus
from parallax.data.dataset import TokenDataset, split
from parallax.data.options import DataOptions, check
from parallax.data.token_store import token_store
from parallax.data.tokenizers import Tokenizer, load_tokenizer
from parallax.errors import ConfigError


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on; `eval` is None if nothing is held out. `description` is a line for the user."""

    train: TokenDataset
    eval: TokenDataset | None
    tokenizer: Tokenizer
    description: str


def prepare_data(options: DataOptions, seq_len: int) -> PreparedData:
    """Read, tokenize and split the data; what is made is cached for the next run.

    Every rank calls it, before there is a process group: the first on each file system builds, the others wait for it
    and read the result. All ranks end with equal fingerprints if they saw the same files, which is worth comparing once
    they can talk.

    Raises:
        ConfigError: the data or the tokenizer cannot be used, or there are too few tokens for `seq_len`.
    """
    if problems := check(options):
        raise ConfigError(problems)
    corpus = user_corpus(options.data) if options.data else standard_library()
    tokenizer = load_tokenizer(options.tokenizer)
    store = token_store(corpus, tokenizer)
    train, held_out = split(store, seq_len, options.eval_fraction)
    num_eval = held_out.num_tokens if held_out else 0
    description = (
        f"{corpus.description}: {store.num_documents:,} documents, {train.num_tokens:,} tokens to train on, "
        f"{num_eval:,} held out; {tokenizer.description}, {tokenizer.vocab_size:,} ids"
    )
    return PreparedData(train, held_out, tokenizer, description)
