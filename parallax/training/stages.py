"""Which layers each pipeline stage holds: the one function that the plan and the run both use."""

from __future__ import annotations

from parallax.models.config import DecoderConfig, layer_matrix_parameters
from parallax.pipeline.split import balance, parse_layout


def stage_ranges(
    config: DecoderConfig,
    num_stages: int,
    pipeline_layout: str | None,
    sequence_length: int,
    num_ranks: int | None = None,
) -> list[range]:
    """Return the layers, by global index, of each of the pipeline's stages, in order.

    Without a pipeline layout the slowest stage is made as fast as possible, layers and head counted by their floating-point
    operations; looking up an embedding costs none worth counting.
    Raises ConfigError if `pipeline_layout` does not fit, or if there are fewer layers than stages.
    """
    if pipeline_layout is not None:
        return parse_layout(pipeline_layout, config.num_hidden_layers, num_stages, num_ranks)
    layer_costs = [_layer_flops(config, sequence_length)] * config.num_hidden_layers
    return balance(layer_costs, 0.0, _head_flops(config), num_stages)


def stage_flops(config: DecoderConfig, ranges: list[range], sequence_length: int) -> list[float]:
    """Return the training operations per token of each stage, which add up to `flops_per_token`."""
    result = [_layer_flops(config, sequence_length) * len(layers) for layers in ranges]
    result[-1] += _head_flops(config)
    return result


def _layer_flops(config: DecoderConfig, sequence_length: int) -> float:
    return 6.0 * (layer_matrix_parameters(config) + config.query_size * sequence_length)


def _head_flops(config: DecoderConfig) -> float:
    return 6.0 * config.vocab_size * config.hidden_size
