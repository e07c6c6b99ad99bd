"""Fine-tune a language model on chats.

    python finetune_sft.py                                                        the model that python pretrain.py left
    torchrun --nproc-per-node 4 finetune_sft.py --tp 2 --pp 2 --init FOLDER --data chats.jsonl      a Hugging Face model

`--help` lists the options. parallax/job.py has the run, from top to bottom.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallax import job
from parallax.config import FinetuneConfig
from parallax.data.chat.prepare import PreparedChats, prepare_chats
from parallax.mesh import Mesh, leave
from parallax.resolve import parse_finetune


def main(words: Sequence[str] | None = None) -> None:
    job.run(parse_finetune(words), prepare, train)


def prepare(config: FinetuneConfig) -> PreparedChats:
    model = config.model_config
    return prepare_chats(config.data, config.training.seq_len, model.vocab_size, model.family)


def train(config: FinetuneConfig, data: PreparedChats, mesh: Mesh) -> None:
    from parallax.objectives.masked_next_token import MaskedNextToken  # here, for it imports torch, which takes seconds

    job.train(config, data, MaskedNextToken(config.model_config.vocab_size, mesh.tp), mesh)


if __name__ == "__main__":
    leave(main)
