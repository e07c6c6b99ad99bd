"""Parallax: pretrain and fine-tune language models with tensor, pipeline and ZeRO-sharded data parallelism.

Importing it costs next to nothing; the parts are imported by name: `parallax.layers`, `parallax.pipeline`, ...
"""

__version__ = "0.1.0"
