"""Whole runs of finetune_sft.py on made-up chats, from small models that transformers saved, in the processes of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import finetune_sft
from parallax.config import FinetuneOptions
from parallax.data.chat.prepare import prepare_chats
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.resolve import read_options, resolve
from tests.data.chat.tokenizers_of_the_test import CHATML, byte_level, save
from tests.training.runs import metrics

NUM_CHATS = 24
# As SmolLM2 has them: heads that 2 does not divide, a third as many KV heads, a tied head.
SMOL: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
EVEN: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def chat(i: int) -> list[dict[str, str]]:
    """Return one of the chats: of one turn, or of two, the lengths all different."""
    turns = [
        {"role": "user", "content": f"what is {i} times {i % 7}?"},
        {"role": "assistant", "content": f"it is {i * (i % 7)}" + "." * (i % 5)},
    ]
    more = [{"role": "user", "content": "are you sure"}, {"role": "assistant", "content": "yes " * (1 + i % 9)}]
    return turns + (more if i % 3 == 0 else [])


def write_chats(path: Path, count: int = NUM_CHATS) -> None:
    """Write them, a line each."""
    path.write_text("".join(json.dumps({"messages": chat(i)}) + "\n" for i in range(count)))


def save_model(folder: Path, sizes: dict[str, Any], **more: Any) -> None:
    """Save a small random Llama of these sizes, with a tokenizer and a chat template.

    Its configuration names no token for padding: transformers gives the looked-up row of one no gradient, and here it ends a turn.
    """
    import torch
    import transformers

    tokenizer = byte_level()
    save(tokenizer, folder, CHATML)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        intermediate_size=96,
        num_hidden_layers=4,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        **sizes,
        **more,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def run(mesh: Mesh, commands: list[str]) -> list[Any]:
    """Run finetune_sft.py's own training for each command line in one world; return the rows of metrics, or the problems."""
    results: list[Any] = []
    for command in commands:
        options, problems = read_options(command.split(), FinetuneOptions)
        assert not problems, problems
        try:
            config = resolve(options, mesh.layout.world_size)
            finetune_sft.train(config, prepare_chats(config.data, config.training.seq_len), mesh)
            results.append(metrics(config.out))
        except ConfigError as error:
            results.append(error.problems)
    return results
