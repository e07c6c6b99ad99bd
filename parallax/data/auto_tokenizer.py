"""Whether `AutoTokenizer` of transformers gives the ids that a run trains on.

Those are tokenizer.json's. `AutoTokenizer` reads the configurations too: for some types of models it takes the class of that type,
whatever the tokenizer's files say, and some classes put a tokenizer together by rules of their own. So what a run will save is
opened once, and compared on a few texts; where `transformers` is not imported, a rule does (`notice_of_class`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Protocol

from parallax.data.tokenizer_files import PROBES
from parallax.data.tokenizers import Tokenizer

WAY_OUT = "open what is saved with PreTrainedTokenizerFast.from_pretrained, which reads tokenizer.json alone"
MARKS_IN_PROBES = "a<|im_start|>user\n b <|im_end|>\n<s> c </s>\n"


class GivesIds(Protocol):
    """What encodes chats: `ids` of a written text, and one such text, "" if there is none."""

    def ids(self, text: str) -> list[int]: ...

    def sample(self) -> str: ...


def notice_of_other_ids(encoder: GivesIds, tokenizer: Tokenizer, family: str | None) -> str:
    """Say that AutoTokenizer gives other ids than training; "" if it does not. family: the model's model_type, None: not known."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        if family is not None:
            (Path(folder) / "config.json").write_text(json.dumps({"model_type": family}))
        try:
            theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # it raises whatever its parts do
            return (
                f"AutoTokenizer of transformers cannot open this tokenizer ({type(error).__name__}: {error}); {WAY_OUT}"
            )
        for text in (encoder.sample(), MARKS_IN_PROBES, *PROBES):
            if theirs(text, add_special_tokens=False)["input_ids"] != encoder.ids(text):
                model = f" of a {family} model" if family is not None else ""
                return (
                    f"AutoTokenizer of transformers opens this tokenizer{model} as {type(theirs).__name__}, which gives other ids "
                    f"than tokenizer.json, and those are what training sees (for example for {_short(text)}); {WAY_OUT}"
                )
    return ""


def notice_of_class(tokenizer: Tokenizer, family: str | None) -> str:
    """Say that `AutoTokenizer` opens the saved tokenizer by rules that are not its own; "" if it does not, without transformers.

    family: the model's model_type. For the types in transformers' list of those whose files name a wrong class
    (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS, 5.24), of ours qwen2, that of the type is taken; Qwen2's splits words, and
    rewrites characters, by its own rules.
    """
    if family != "qwen2" or "tokenizer.json" not in (files := tokenizer.files()):
        return ""
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    if str(config.get("tokenizer_class", "")).removesuffix("Fast") == "Qwen2Tokenizer":
        return ""
    return (
        "AutoTokenizer of transformers opens the tokenizer of any qwen2 model by Qwen2's rules, which may give other ids than "
        f"training sees; {WAY_OUT}, or train a llama or qwen3 model"
    )


def _short(text: str, most: int = 30) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")
