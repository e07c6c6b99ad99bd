from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallax.data import tokenizer_files
from parallax.data.corpus import Corpus, standard_library
from parallax.data.default_tokenizer import train
from parallax.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from parallax.errors import ConfigError

TEXTS = [
    "",
    " ",
    "Hello  world",
    "def f(x):\n    return [x] * 2025  # ----------\n\n",
    "\ttab\r\nCRLF\rCR \u2028 \u2029 \x85 \x00 \x7f",
    "é e\u0301 ﬁ ½ 漢字 한글 😀 👩‍👩‍👧 \ufeff\ufffd\U0010ffff",
    "'s we'll  <0x0A> <unk> <s> ==== ......",
]
SPACE_MARKS = [
    "\u2581",
    "a\u2581b \u2581\u2581 c",
    "\u2581 ",
]  # which transformers, like sentencepiece, reads as spaces
ANY_TEXT = st.one_of(st.text(), st.text(alphabet="ab \u2581\t\r\n\u2028\ufeff\x00=_é", max_size=40))


@given(ANY_TEXT)
def test_bytes_give_every_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), 256]) == text


@given(text=ANY_TEXT)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_the_default_tokenizer_gives_every_text_back(default_tokenizer: Tokenizer, text: str) -> None:
    ids = default_tokenizer.encode(text)
    assert all(1 < i < 4096 for i in ids)  # 0 is <unk>, 1 is the end of text
    assert default_tokenizer.decode(ids) == text


def test_the_default_tokenizer_is_what_its_description_says(default_tokenizer: Tokenizer) -> None:
    assert (default_tokenizer.vocab_size, default_tokenizer.eos_id, default_tokenizer.bos_id) == (4096, 1, None)
    text = Path(json.__file__).read_text()
    ids = default_tokenizer.encode(text)
    assert len(text) / len(ids) > 3
    assert default_tokenizer.encode_batch([text, "a\u2581b", ""])[0].tolist() == ids
    assert default_tokenizer.decode([1, *ids, 1]) == text


def test_training_is_deterministic() -> None:
    files = standard_library().files[:40]
    assert train(Corpus(files, 0, "a part")) == train(Corpus(files, 0, "a part"))


def test_a_corpus_too_small_for_the_vocabulary_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer of 4096 pieces can be trained on a part .* --tokenizer"):
        train(Corpus(standard_library().files[:1], 0, "a part"))


def saved(tokenizer: Tokenizer, folder: Path, texts: Sequence[str] = TEXTS) -> Any:
    """Save a tokenizer and open it with transformers, and check our own reading of what was saved."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    tokenizer.save(folder)
    again = load_tokenizer(folder)
    assert (again.vocab_size, again.eos_id, again.bos_id) == (
        tokenizer.vocab_size,
        tokenizer.eos_id,
        tokenizer.bos_id,
    )
    opened = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert len(opened) == tokenizer.vocab_size
    assert opened.eos_token_id == tokenizer.eos_id and opened.bos_token_id == tokenizer.bos_id
    for text in texts:
        ids = tokenizer.encode(text)
        assert opened.encode(text) == again.encode(text) == ids, text  # with nothing added
        assert opened.decode(ids) == again.decode(ids) == tokenizer.decode(ids), text
    return opened


def test_transformers_opens_the_saved_byte_tokenizer_with_the_same_ids(tmp_path: Path) -> None:
    opened = saved(ByteTokenizer(), tmp_path / "saved")
    for text in SPACE_MARKS:
        assert opened.encode(text) == ByteTokenizer().encode(text)


def test_transformers_opens_the_saved_default_tokenizer_with_the_same_ids(
    default_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    opened = saved(default_tokenizer, tmp_path / "saved")
    for file in standard_library().files[::40]:
        text = file.path.read_text(encoding="utf-8")
        assert opened.encode(text) == default_tokenizer.encode(text)
    assert load_tokenizer(tmp_path / "saved" / "tokenizer.model").fingerprint == default_tokenizer.fingerprint


def sentencepiece_model(path: Path, **options: Any) -> Tokenizer:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    lines = (line for file in standard_library().files[:12] for line in file.path.open(encoding="utf-8"))
    SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=600, byte_fallback=True, minloglevel=2, **options
    )
    path.write_bytes(model.getvalue())
    return load_tokenizer(path)


def test_a_llama_like_sentencepiece_model_is_read_and_saved_with_the_same_ids(tmp_path: Path) -> None:
    """With a space put before the text and <s> in the vocabulary, as Llama 2 and Mistral have it."""
    options = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    tokenizer = sentencepiece_model(tmp_path / "a.model", **options)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (600, 1, 2)
    assert tokenizer.decode(tokenizer.encode(TEXTS[3])) == TEXTS[3]
    # transformers, and not sentencepiece, reads "<s>" in a text as the special token
    saved(tokenizer, tmp_path / "saved", [text for text in TEXTS if "<s>" not in text])


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"model_type": "bpe"}])
def test_a_model_that_cannot_be_said_exactly_is_saved_as_its_model_alone(tmp_path: Path, options: Any) -> None:
    """A unigram model, and one that normalises: the wrong ids would be worse than none."""
    tokenizer = sentencepiece_model(tmp_path / "a.model", **options)
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["tokenizer.model"]
    assert load_tokenizer(tmp_path / "saved").encode("a  b") == tokenizer.encode("a  b")


def hugging_face_file(
    folder: Path, special: str = "<|endoftext|>", name: str = "tokenizer.json", shapes_batches: bool = False
) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(exist_ok=True)
    fast = ByteLevelBPETokenizer()
    lines = (line for file in standard_library().files[:12] for line in file.path.open(encoding="utf-8"))
    fast.train_from_iterator(lines, vocab_size=500, special_tokens=[special], show_progress=False)
    if shapes_batches:  # as some published files do
        fast.enable_truncation(8)
        fast.enable_padding(length=16)
    fast.save(str(folder / name))
    return folder / name


def test_a_hugging_face_folder_is_read_whole_and_copied(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    hugging_face_file(folder, "<end>", shapes_batches=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "<end>"}, "chat_template": "{{1}}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_text("not a tokenizer's file")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 500 and tokenizer.eos_id == 0
    assert len(tokenizer.encode("x " * 100)) >= 100  # not truncated, not padded
    assert tokenizer.encode("a<end>b")[1] == 0
    assert load_tokenizer(folder / "tokenizer.json").fingerprint == tokenizer.fingerprint
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    names = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names
    assert all((tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_a_lone_tokenizer_json_is_read_and_saved_for_transformers(tmp_path: Path) -> None:
    path = hugging_face_file(tmp_path / "source", name="mine.json")
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_id == 0
    opened = saved(tokenizer, tmp_path / "saved")
    assert opened.eos_token == "<|endoftext|>"


def test_a_tokenizer_that_is_none_is_said_so(tmp_path: Path) -> None:
    for name, content, says in (
        ("a.model", b"\n\x05hello", "sentencepiece cannot read the model"),
        ("a.json", b'{"model": {}}', r"no valid tokenizer\.json"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"--tokenizer .*{name}: .*{says}"):
            load_tokenizer(tmp_path / name)
    folder = tmp_path / "source"
    hugging_face_file(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(ConfigError, match="names the special token '<nowhere>'"):
        load_tokenizer(folder)
    for config, says in (
        ("[]", "is no object of JSON"),
        ('{"eos_token": 5}', "eos_token .* is 5, which is no name of a token"),
    ):
        (folder / "tokenizer_config.json").write_text(config)
        with pytest.raises(ConfigError, match=says):
            load_tokenizer(folder)


def test_files_are_made_once_and_are_the_callers_own(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making them leaves a megabyte behind each time, and each save asks for them."""
    files = default_tokenizer.files()
    monkeypatch.setattr(tokenizer_files, "sentencepiece_files", None)
    default_tokenizer.files().clear()
    assert default_tokenizer.files() == files


def test_fingerprints_tell_tokenizers_apart(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    hugging_face_file(tmp_path / "a")
    every = [ByteTokenizer(), default_tokenizer, load_tokenizer(tmp_path / "a")]
    assert len({tokenizer.fingerprint for tokenizer in every}) == 3
    assert ByteTokenizer().fingerprint == load_tokenizer("bytes").fingerprint


def test_a_token_is_found_by_its_name_and_named_by_its_id(default_tokenizer: Tokenizer) -> None:
    for tokenizer in (default_tokenizer, ByteTokenizer()):
        assert tokenizer.eos_id is not None
        assert tokenizer.token_id("<|endoftext|>") == tokenizer.eos_id
        assert tokenizer.token_name(tokenizer.eos_id) == "<|endoftext|>"
        (letter,) = tokenizer.encode("a")
        assert tokenizer.token_id("a") == letter
        assert tokenizer.token_id("<|no such token|>") is None
