"""Megatron Core's GPTModel in its own schedules, on CPUs over gloo; tested with megatron-core 0.16.1.

Its code runs as it is: GPTModel of TransformerLayers by the local specification (its ColumnParallelLinear, RowParallelLinear,
VocabParallelEmbedding and vocabulary-parallel cross-entropy), get_forward_backward_func with 1F1B without interleaving, and its
deallocation of stage outputs. What is set or replaced, and why:

    torch.cuda.current_device, synchronize     it asks them for where to put tensors, and waits after messages: the CPU, nothing
    torch.zeros(..., device="cuda")            in its schedules only, which name the device themselves
    the core of attention                      its local one builds all scores, which makes a step 1.16 times as long here; on GPUs
                                               it is Transformer Engine's fused one, whose place F.scaled_dot_product_attention has
    gradient_accumulation_fusion, fused norm   need APEX or Transformer Engine
    bias_activation_fusion                     goes through torch.compile, and gains nothing here
    the optimizer                              torch's fused AdamW, clipped like DTensor's: its own needs CUDA's tensor types

Gradients are parameters' `grad`: its DistributedDataParallel, which one data-parallel rank does not need, would add them once more.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and APEX are not there
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.peers.model import make_adamw
from benchmarks.task import Batch, Task, initial_weights
from parallax.mesh import Mesh
from parallax.models.config import DecoderConfig


class _TorchWithoutCuda(types.ModuleType):
    """torch, whose zeros are made on the CPU whatever device is named."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)


def stand_in_for_cuda() -> None:
    """Let Megatron Core run where there is no GPU; changes this process for good."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    schedules.torch = _TorchWithoutCuda("torch")


class FusedAttention(torch.nn.Module):
    """The core of attention: `[seq, batch, heads, head_dim]`, with fewer heads of keys and values, to `[seq, batch, hidden]`."""

    def __init__(self, **_options: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, **_options: Any
    ) -> torch.Tensor:
        query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def make_model(task: Task, tp: int, pp: int) -> GPTModel:
    """Return this rank's part of the model, with Parallax's initial weights."""
    model = task.model
    config = TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = FusedAttention
    part = GPTModel(
        config,
        layer,
        model.vocab_size,
        task.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
    )
    load(part, model, initial_weights(task))
    return part


@torch.no_grad()
def load(part: GPTModel, model: DecoderConfig, weights: dict[str, torch.Tensor]) -> None:
    """Copy this rank's part of the weights, by their Hugging Face names.

    Rows of linear_qkv go by groups of heads that share a key: its queries, its key, its value, the next group; a tp rank has whole
    groups. Rows of linear_fc1 on a tp rank are its gate's, then its up's. Rotary positions turn the halves of a head, as Hugging
    Face's do.
    """
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()

    def mine(name: str, dim: int) -> torch.Tensor:
        return weights[name].chunk(tp, dim)[rank]

    def groups(name: str) -> torch.Tensor:
        return mine(name, 0).view(model.num_key_value_heads // tp, -1, model.hidden_size)

    if part.pre_process:
        part.embedding.word_embeddings.weight.copy_(mine("model.embed_tokens.weight", 0))
    for layer in part.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        fused = torch.cat([groups(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"], 1)
        attention.linear_qkv.weight.copy_(fused.flatten(0, 1))
        attention.linear_proj.weight.copy_(mine(f"{prefix}self_attn.o_proj.weight", 1))
        halves = [mine(f"{prefix}mlp.{name}_proj.weight", 0) for name in ("gate", "up")]
        mlp.linear_fc1.weight.copy_(torch.cat(halves))
        mlp.linear_fc2.weight.copy_(mine(f"{prefix}mlp.down_proj.weight", 1))
        layer.input_layernorm.weight.copy_(weights[f"{prefix}input_layernorm.weight"])
        layer.pre_mlp_layernorm.weight.copy_(weights[f"{prefix}post_attention_layernorm.weight"])
    if part.post_process:
        part.decoder.final_layernorm.weight.copy_(weights["model.norm.weight"])
        if part.output_layer.weight is not None:
            name = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
            part.output_layer.weight.copy_(mine(name, 0))


def _forward(batches: Iterator[Batch], part: GPTModel) -> tuple[torch.Tensor, Callable]:
    """Return a micro-batch's output and what makes its loss of it, as the schedules ask for them."""
    batch = next(batches)
    output = part(batch["input_ids"], None, None, labels=batch["labels"])
    return output, _mean


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = losses.mean()
    return loss, loss.detach().clone()  # the schedule divides the first in place


class MegatronLoop:
    """One data-parallel rank, any tp and pp."""

    def __init__(self, mesh: Mesh, task: Task) -> None:
        layout = mesh.layout
        assert layout.dp == 1, layout
        self.task, self.clip_grad = task, task.optimizer.clip_grad
        stand_in_for_cuda()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(layout.tp, layout.pp)
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.pp = parallel_state.get_pipeline_model_parallel_group()
        self.is_counted = mesh.tp_rank == 0 and mesh.pp_rank == layout.pp - 1
        self.model = make_model(task, layout.tp, layout.pp)
        self.optimizer = make_adamw(self.model, task)
        self.run = partial(
            schedules.get_forward_backward_func(),
            forward_step_func=_forward,
            model=self.model,
            num_microbatches=task.micro_batches_per_rank(mesh),
            seq_length=task.seq_len,
            micro_batch_size=task.micro_batch,
        )

    def step(self, batches: list[Batch]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.run(data_iterator=iter(batches))
        self._clip()
        self.optimizer.step()
        return torch.stack(losses).mean() if self.is_counted else torch.zeros(())

    def _clip(self) -> None:
        """Clip by the norm over all ranks: what tp ranks hold alike counts once."""
        parameters = list(self.model.parameters())
        alike = [parameter.grad for parameter in parameters if parameter.ndim == 1]  # norms
        split = [parameter.grad for parameter in parameters if parameter.ndim > 1]
        square = torch.nn.utils.get_total_norm(split).square()
        if self.tp.size() > 1:
            dist.all_reduce(square, group=self.tp)
        square += torch.nn.utils.get_total_norm(alike).square()
        if self.pp.size() > 1:
            dist.all_reduce(square, group=self.pp)
        torch._foreach_mul_(split + alike, (self.clip_grad / (square.sqrt() + 1e-6)).clamp(max=1.0))
