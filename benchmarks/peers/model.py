"""The decoder as one writes it in plain PyTorch: separate projections, nn.RMSNorm, SwiGLU, rotary positions, SDPA.

Parameters have Hugging Face's names, so the weights of any other implementation load by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.task import Batch, Task, initial_weights
from parallax.models.config import DecoderConfig
from parallax.models.rotary import inverse_frequencies


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[batch, seq, heads, head_dim]` by `[seq, 1, head_dim/2]`."""
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, seq_len: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.key_value_size, bias=False)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=False)
        angles = torch.outer(torch.arange(seq_len).float(), inverse_frequencies(config)).unsqueeze(1)
        # Plain attributes: DistributedDataParallel would broadcast buffers before every forward.
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # The heads are counted from the tensor, for under tensor parallelism a projection returns this rank's alone.
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, self.cos, self.sin), _rotate(key, self.cos, self.sin)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, seq_len: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config, seq_len)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Body(nn.Module):
    """What Hugging Face calls `model`; parts that a pipeline stage does not hold are None."""

    def __init__(self, config: DecoderConfig, seq_len: int, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(index): Layer(config, seq_len) for index in layers})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps) if last else None


class Decoder(nn.Module):
    """Token ids `[batch, seq]`, or a stage's input, to logits `[batch, seq, vocab]`, or a stage's output.

    stage, stages: which part of the layers, cut into equal parts, is held; the whole by default.
    """

    def __init__(self, task: Task, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        config, first, last = task.model, stage == 0, stage == stages - 1
        count = config.num_hidden_layers
        layers = range(stage * count // stages, (stage + 1) * count // stages)
        self.model = Body(config, task.seq_len, layers, first, last)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.model.embed_tokens is not None:
            hidden = self.model.embed_tokens(hidden)
        for layer in self.model.layers.values():
            hidden = layer(hidden)
        return hidden if self.lm_head is None else self.lm_head(self.model.norm(hidden))


def make_decoder(task: Task, stage: int = 0, stages: int = 1) -> Decoder:
    """Return the model, or one stage of it, with Parallax's initial weights."""
    decoder, weights = Decoder(task, stage, stages), initial_weights(task)
    decoder.load_state_dict({name: weights[name] for name in decoder.state_dict()})
    return decoder


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of `[batch, seq, vocab]`."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def accumulate(
    model: nn.Module,
    batches: list[Batch],
    share: float,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mean_loss,
) -> torch.Tensor:
    """Run forward and backward of micro-batches, each counting `share` of its loss; return the sum of these."""
    total = torch.zeros(())
    for batch in batches:
        loss = loss_function(model(batch["input_ids"]), batch["labels"]) * share
        loss.backward()
        total += loss.detach()
    return total


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Return AdamW's groups: matrices decay, norms do not."""
    parameters = list(parameters)
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
    ]


def adamw_options(task: Task) -> dict:
    """Return what torch.optim.AdamW is given besides the parameters."""
    options = task.optimizer
    return {
        "lr": task.learning_rate,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
        "fused": True,
    }


def make_adamw(model: nn.Module, task: Task) -> torch.optim.AdamW:
    """Return the optimizer of all of a model's parameters."""
    return torch.optim.AdamW(parameter_groups(model.parameters(), task.optimizer.weight_decay), **adamw_options(task))
