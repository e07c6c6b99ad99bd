"""Tiny Hugging Face tokenizers and chat templates in the formats of real models, written for these tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_WITH_GENERATION = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

LLAMA2 = """\
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""

# With calls as Qwen2.5 writes them, and thoughts as Qwen3 does: only after the last question are they kept.
QWEN = """\
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set thought = '' %}
{%- set content = message.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"]

TEXT = (
    "user\nassistant\nsystem\n\nhello there  hello world    four spaces\nwhat is it? it is a test. \n\n the answer: yes\n"
    "héllo wörld 漢字 😀 :\n\n: hello\n\n\n[INST] [/INST] hi hi hi\n<think>\n\n</think>\n\n"
) * 5


def byte_level(
    eos: str = "<|im_end|>",
    pad: str = "<|im_end|>",
    trim_offsets: bool = False,
    bos: str = "<s>",
    special: Sequence[str] = SPECIAL,
    use_regex: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose merges run over line ends and spaces, so that tokens join header and content."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=bos, eos_token=eos, pad_token=pad)


def single_bytes(eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens: no token joins two parts of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token=eos, pad_token=eos)


def llama2_like() -> PreTrainedTokenizerFast:
    """Spaces as U+2581, one put before each text, bytes as fallback: a sentencepiece model as `tokenizers` writes it."""
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    for piece in [
        "\u2581",
        *map(chr, range(33, 127)),
        "he",
        "ll",
        "\u2581he",
        "\u2581hell",
        "\u2581hello",
        "llo",
        "hell",
        "hello",
    ]:
        vocab.setdefault(piece, len(vocab))
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("\u2581", "he"),
        ("he", "ll"),
        ("\u2581he", "ll"),
        ("\u2581hell", "o"),
        ("hell", "o"),
    ]
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save(tokenizer: PreTrainedTokenizerFast, folder: Path, template: str | None) -> str:
    """Write a Hugging Face tokenizer folder."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)
