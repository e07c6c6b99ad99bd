"""Which tokenizer and which chat template go together, and the tokenizer that a checkpoint carries: with the template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from parallax.data.auto_tokenizer import notice_of_class, notice_of_other_ids
from parallax.data.chat.encoded import ChatEncoder
from parallax.data.chat.hugging_face import HuggingFaceTemplate, load_hugging_face
from parallax.data.chat.templates import DEFAULT_TEMPLATE, MARKUPS, OwnTemplate, jinja_of
from parallax.data.tokenizer_source import TokenizerSource, find_tokenizer
from parallax.data.tokenizers import Tokenizer, load_tokenizer
from parallax.errors import ConfigError


class TokenizerWithTemplate(Tokenizer):
    """A tokenizer whose files hold a chat template too, so that `transformers` opens the folder with it."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.vocab_size, self.eos_id, self.bos_id = tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id
        self.fingerprint, self.description = tokenizer.fingerprint, tokenizer.description

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._tokenizer.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_id(name)

    def token_name(self, token: int) -> str:
        return self._tokenizer.token_name(token)

    def files(self) -> dict[str, bytes]:
        return {**self._tokenizer.files(), "chat_template.jinja": self._template.encode()}


def load_chat_encoder(tokenizer: str | None, template: str | None) -> tuple[Tokenizer, ChatEncoder]:
    """Open what --tokenizer and --template name; None are the default tokenizer, and the tokenizer's own template or ChatML.

    `notice` of the encoder says so where a Hugging Face tokenizer brings no template and none was asked for.

    Raises:
        ConfigError: one of them cannot be read, or they do not fit each other.
    """
    if problems := check_template(tokenizer, template):
        raise ConfigError(problems)
    source = _ours_if_it_is(find_tokenizer(tokenizer), template)
    opened = load_tokenizer(tokenizer if source.kind != "sentencepiece" else source.path)
    encoder: ChatEncoder
    if source.kind == "huggingface":
        assert source.path is not None
        encoder = load_hugging_face(source.path, opened, str(tokenizer), template)
    else:
        brought = None if template is not None or source.path is None else _template_beside(source.path, opened)
        encoder = OwnTemplate(template or brought or DEFAULT_TEMPLATE, opened)
    return opened if encoder.template is None else TokenizerWithTemplate(opened, encoder.template), encoder


def notice_of_ids(tokenizer: Tokenizer, encoder: ChatEncoder, family: str | None) -> str:
    """Say where `transformers` opens what is saved with other ids than training sees; "" if it does not.

    tokenizer, encoder: of `load_chat_encoder`. family: the model's model_type, None: not known.
    """
    if isinstance(encoder, HuggingFaceTemplate):  # transformers is imported, so it can be asked
        return notice_of_other_ids(encoder, tokenizer, family)
    return notice_of_class(tokenizer, family)


def problem_of_ids(tokenizer: Tokenizer, encoder: ChatEncoder, vocab_size: int) -> str:
    """Say that a model of `vocab_size` ids has no room for those of chats; "" if it has."""
    if encoder.vocab_size <= vocab_size:
        return ""
    more = encoder.pieces(range(tokenizer.vocab_size, encoder.vocab_size))
    why = f", for the files beside its tokenizer.json add tokens, such as {more[0]!r}" if more else ""
    return (
        f"the tokenizer {tokenizer.description} has {encoder.vocab_size} ids when transformers opens it{why}; the model has room "
        f"for {vocab_size}: take these tokens out of the files, or use --vocab {encoder.vocab_size} or more with fresh weights"
    )


def _ours_if_it_is(source: TokenizerSource, template: str | None) -> TokenizerSource:
    """Return the sentencepiece model beside a tokenizer.json that was made of it by us, also where there is `transformers`: so a
    run is the same with and without it.

    Another's tokenizer.json may have more tokens than the model, and another's template needs `transformers`.
    """
    if source.kind != "huggingface" or source.path is None:
        return source
    model = source.path.with_name("tokenizer.model")
    if not model.is_file():
        return source
    try:
        opened = load_tokenizer(model)
    except ConfigError:  # it has this name and is no sentencepiece model, as Llama 3's
        return source
    if opened.files().get("tokenizer.json") != source.path.read_bytes():
        return source
    if template is None and find_spec("transformers") is not None:
        try:
            _template_beside(model, opened)
        except ConfigError:
            return source
    return TokenizerSource("sentencepiece", model)


def _template_beside(model: Path, opened: Tokenizer) -> str | None:
    """Return which template of ours lies beside a sentencepiece model, as in a checkpoint; None if there is none.

    Raises:
        ConfigError: it is another's, which needs a tokenizer that `transformers` opens.
    """
    path = model.parent / "chat_template.jinja"
    brought: str | None
    try:
        if path.is_file():
            brought = path.read_text(encoding="utf-8")
        else:
            config = json.loads((model.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
            brought = config.get("chat_template") if isinstance(config, dict) else None
    except (OSError, ValueError):
        return None
    if not brought:
        return None
    for name, markup in MARKUPS.items():
        if (markup.end or opened.eos_id is not None) and jinja_of(name, opened) == brought:
            return name
    raise ConfigError(
        f"{model.parent} brings a chat template, but no tokenizer.json to use it with; load the folder with transformers and save "
        f"it again, or choose --template {', '.join(MARKUPS)}."
    )


def check_template(tokenizer: str | None, template: str | None) -> list[str]:
    """Say what is wrong with --template; what is wrong with --tokenizer alone is left to `find_tokenizer`."""
    if template is None or template in MARKUPS:
        return []
    possible = f"use {', '.join(MARKUPS)}, or a file with a template in Jinja"
    try:
        Path(template).read_text(encoding="utf-8")
    except OSError as error:
        return [
            f"--template {template}: there is no such template, and no file to read ({error.strerror}); {possible}."
        ]
    except ValueError:
        return [f"--template {template}: the file is not UTF-8 text; {possible}."]
    try:
        kind = find_tokenizer(tokenizer).kind
    except ConfigError:
        return []
    if kind != "huggingface":
        return [f"--template {template}: Jinja needs a Hugging Face tokenizer; use {', '.join(MARKUPS)} with this one."]
    return []
