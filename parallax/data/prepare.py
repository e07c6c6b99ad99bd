"""From options to data sets, in one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from parallax.data.auto_tokenizer import notice_of_class
from parallax.data.blend import BlendedDataset
from parallax.data.checksums import DataFile
from parallax.data.corpus import Reading, standard_library, user_corpus
from parallax.data.dataset import Borders, Sample, TokenDataset
from parallax.data.options import DataOptions, check
from parallax.data.sources import DataSource, is_token_file, parse_data, parse_shares, parse_valid
from parallax.data.split import Split, hold_out, split_documents
from parallax.data.stream import TokenStream
from parallax.data.token_files import token_files
from parallax.data.token_store import TokenStore, token_store
from parallax.data.tokenizers import Tokenizer, load_tokenizer
from parallax.errors import ConfigError

Samples = TokenDataset | BlendedDataset[Sample]


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on.

    eval: the held-out part, test: what is left for the end; None if there is none. valid: more sets to evaluate on, by name.
    description: a line for the user. files: of the data that is trained on, and their checksums. notices: what the user should
    know before the run, a line each.
    """

    train: Samples
    eval: Samples | None
    tokenizer: Tokenizer
    description: str
    test: Samples | None = None
    valid: dict[str, TokenDataset] = field(default_factory=dict)
    files: tuple[DataFile, ...] = ()
    notices: tuple[str, ...] = ()

    def evaluated(self) -> list[tuple[str, Samples, bool]]:
        """Return what is evaluated: the name of its loss in the metrics, the samples, and whether only after the last step."""
        named = [(f"eval_loss/{name}", samples, False) for name, samples in self.valid.items()]
        held_out = [("eval_loss", self.eval, False)] if self.eval is not None else []
        return [*held_out, *named, *([("test_loss", self.test, True)] if self.test is not None else [])]


def prepare_data(options: DataOptions, seq_len: int, family: str | None = None) -> PreparedData:
    """Read, tokenize and split the data; what is made is cached for the next run.

    family: the model_type of the model, None: not known.

    Every rank calls it, before there is a process group: the first on each file system builds, the others wait for it
    and read the result. All ranks end with equal fingerprints if they saw the same files, which is worth comparing once
    they can talk.

    Raises:
        ConfigError: the data or the tokenizer cannot be used, or there are too few tokens for `seq_len`.
    """
    if problems := check(options):
        raise ConfigError(problems)
    tokenizer = load_tokenizer(options.tokenizer)
    borders = Borders(options.document_attention, options.reset_positions)
    sources = parse_data(options.data) or [DataSource(())]
    streams = [_open_stream(source.paths, tokenizer) for source in sources]
    splits = [
        _split(stream, source, options, seq_len, borders) for stream, source in zip(streams, sources, strict=True)
    ]
    weights = [source.weight or Fraction(1) for source in sources]
    train = _join([split.train for split in splits], weights)
    assert train is not None
    valid = {
        name: _all_of(_open_stream([path], tokenizer, f"--valid {name}="), seq_len, borders, f"--valid {name}={path}")
        for name, path in parse_valid(options.valid).items()
    }
    return PreparedData(
        train,
        _join([split.eval for split in splits], weights),
        tokenizer,
        _describe(sources, streams, splits, tokenizer),
        _join([split.test for split in splits], weights),
        valid,
        tuple(itertools.chain.from_iterable(stream.files for stream in streams)),
        tuple(filter(None, [notice_of_class(tokenizer, family)])),
    )


def _open_stream(paths: Sequence[str], tokenizer: Tokenizer, flag: str = "--data ") -> TokenStream:
    """Return the tokens of paths, in their order; those of text that follow each other are made together."""
    if not paths:
        return TokenStream([token_store(standard_library(), tokenizer)])
    stores: list[TokenStore] = []
    for is_tokens, group in itertools.groupby(paths, is_token_file):
        if is_tokens:
            stores += [token_files(path, tokenizer, flag) for path in group]
        else:
            stores.append(token_store(user_corpus(list(group), Reading(flag)), tokenizer))
    return TokenStream(stores)


def _split(stream: TokenStream, source: DataSource, options: DataOptions, seq_len: int, borders: Borders) -> Split:
    try:
        if options.split is not None:
            return split_documents(stream, seq_len, parse_shares(options.split), borders)
        return hold_out(stream, seq_len, options.eval_fraction, borders)
    except ConfigError as error:
        if source.weight is None:
            raise
        raise ConfigError([f"--data {source.paths[0]}: {problem}" for problem in error.problems]) from error


def _all_of(stream: TokenStream, seq_len: int, borders: Borders, what: str) -> TokenDataset:
    try:
        return TokenDataset(stream, [(0, stream.num_tokens)], seq_len, borders)
    except ConfigError as error:
        raise ConfigError([f"{what}: {problem}" for problem in error.problems]) from error


def _join(parts: Sequence[TokenDataset | None], weights: Sequence[Fraction]) -> Samples | None:
    """Return the only part as it is, several as a blend; None where nothing was asked for."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    assert len(present) == len(parts), "a split gives each source the same parts"
    return present[0] if len(present) == 1 else BlendedDataset(present, weights)


def _describe(
    sources: Sequence[DataSource], streams: Sequence[TokenStream], splits: Sequence[Split], tokenizer: Tokenizer
) -> str:
    total = sum(source.weight or 1 for source in sources)
    lines = []
    for source, stream, split in zip(sources, streams, splits, strict=True):
        name = " ".join(source.paths) or "the source text of Python's standard library"
        share = "" if source.weight is None else f"{float(source.weight / total):.4g} "
        num_eval = split.eval.num_tokens if split.eval else 0
        lines.append(
            f"{share}{name}: {stream.num_documents:,} documents, {split.train.num_tokens:,} tokens to train on, "
            f"{num_eval:,} held out" + (f", {split.test.num_tokens:,} for the test" if split.test else "")
        )
    return "; ".join([*lines, f"{tokenizer.description}, {tokenizer.vocab_size:,} ids"])
