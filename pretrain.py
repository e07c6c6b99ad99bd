"""Pretrain a language model.

    python pretrain.py                                                one process
    torchrun --nproc-per-node 8 pretrain.py --tp 2 --pp 2             the same model in 8

`--help` lists the options. parallax/job.py has the run, from top to bottom.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallax import job
from parallax.config import PretrainConfig
from parallax.data.prepare import PreparedData, prepare_data
from parallax.mesh import Mesh, leave
from parallax.resolve import parse_pretrain


def main(words: Sequence[str] | None = None) -> None:
    job.run(parse_pretrain(words), prepare, train)


def prepare(config: PretrainConfig) -> PreparedData:
    return prepare_data(config.data, config.training.seq_len, config.model_config.family)


def train(config: PretrainConfig, data: PreparedData, mesh: Mesh) -> None:
    from parallax.objectives.next_token import NextToken  # here, for it imports torch, which takes seconds

    job.train(config, data, NextToken(config.model_config.vocab_size, mesh.tp), mesh)


if __name__ == "__main__":
    leave(main)
