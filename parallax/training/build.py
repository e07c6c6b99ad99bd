"""From options to a train step: this rank's stages, their gradient buckets, the optimizer, and the pipeline around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallax.data_parallel.bucket import GradientBuckets, NamedParameter
from parallax.data_parallel.optimizer import gradient_types, make_optimizer, rule_of
from parallax.data_parallel.options import OptimizerOptions
from parallax.errors import ConfigError
from parallax.mesh import Mesh
from parallax.models.config import DecoderConfig, linear_layers
from parallax.models.stages import EMBEDDING, shape_stages
from parallax.pipeline.actions import Schedule
from parallax.pipeline.transport import ActivationSpec
from parallax.precision.backends.choose import agree_on_backend, choose_backend, this_device
from parallax.precision.options import Fp8Options
from parallax.precision.recipe import Table, in_words
from parallax.tensor_parallel.facts import named_parameters_with_facts
from parallax.tensor_parallel.precision import Fp8State, apply_recipe
from parallax.training.faults import Judge
from parallax.training.first_values import FirstValues, give_places
from parallax.training.options import TrainingOptions
from parallax.training.step import Objective, StageRunner, TrainStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp64": torch.float64}


def build_train_step(
    mesh: Mesh,
    model: DecoderConfig,
    layers: Sequence[range],
    schedule: Schedule,
    training: TrainingOptions,
    optimizer: OptimizerOptions,
    objective: Objective,
    *,
    sequence_parallel: bool = False,
    spike_factor: float | None = None,
    fp8: Fp8Options | None = None,
) -> TrainStep:
    """Return this rank's train step, with the initial weights of the seed; called by every rank of the world.

    layers: of each pipeline stage, as `stage_ranges` gives them. schedule: of the micro-batches of a step.
    spike_factor: of the running mean of the losses, above which a step's loss makes it a bad one.
    fp8: with --precision fp8; raises ConfigError on all ranks when its backend cannot run on one, or no GPU takes shares over tp.
    """
    fp8 = fp8 or Fp8Options()
    choice = None if training.precision != "fp8" else agree_on_backend(fp8, mesh, linear_layers(model), mesh.layout.tp)
    sequence_parallel = sequence_parallel and mesh.tp is not None
    stages = shape_stages(
        model,
        layers,
        schedule.holders,
        mesh.pp_rank,
        tp=mesh.tp,
        sequence_parallel=sequence_parallel,
        recompute=training.recompute,
    )
    give_places(stages.values(), DTYPES[training.precision], mesh.device)
    for stage in stages.values():
        stage.loss_chunk = training.loss_chunk
        if training.compile:
            from parallax.models.compiled import compile_stage  # here, for torch's compiler takes a second to import

            compile_stage(stage)
    fp8_state = None if choice is None else apply_recipe(stages.values(), fp8.recipe, choice, mesh)
    named: dict[str, NamedParameter] = {}  # a rank's stages may share the embedding
    for stage in stages.values():
        for entry in named_parameters_with_facts(stage, mesh.tp):
            named.setdefault(entry[0], entry)
    # In the order of the whole model's forward on every rank, so that all agree on the order of reductions: a last stage also has
    # the tied embedding.
    parameters = sorted(named.values(), key=lambda entry: entry[0] != EMBEDDING)
    used = {index: list(stage.parameters()) for index, stage in stages.items()}
    buckets = GradientBuckets(
        parameters,
        mesh,
        zero=optimizer.zero,
        zero_group=optimizer.zero_group,
        stages=used,
        scopes=[stage.scopes for stage in stages.values()],
        overlap_gather=optimizer.overlap_param_gather == "on",
        apart=[EMBEDDING] if model.tie_word_embeddings and schedule.num_stages > 1 else [],
        types=gradient_types(optimizer),
        rule=rule_of(optimizer),
        fill=FirstValues(training.seed),
    )
    if fp8_state is not None:
        gathered = {sink.parameter for bucket in buckets.buckets if bucket.is_gathered for sink in bucket.sinks}
        fp8_state.forget_with((scope for stage in stages.values() for scope in stage.scopes), gathered)
    length = training.seq_len // mesh.layout.tp if sequence_parallel else training.seq_len
    spec = ActivationSpec((training.micro_batch, length, model.hidden_size), DTYPES[training.precision])
    return TrainStep(
        StageRunner(stages, objective, schedule, spec, mesh),
        parameters,
        buckets,
        make_optimizer(buckets, optimizer),
        mesh,
        optimizer.clip_grad,
        Judge(mesh.device, spike_factor),
        fp8_state,
    )


def describe_fp8(state: Fp8State | None, layers: Table | None) -> list[str]:
    """Return what computes in FP8 and why, and how each layer's products run, a line each; nothing without FP8."""
    if state is None or layers is None:
        return []
    lines = in_words(layers)
    return [f"fp8            {state.choice.backend.name}: {state.choice.reason}"] + [" " * 15 + line for line in lines]


def planned_backend(fp8: Fp8Options, model: DecoderConfig, tp: int) -> tuple[str, str]:
    """Return the backend that this machine would compute with, or the one that was asked for, and a line that says which it is."""
    try:
        choice = choose_backend(fp8, this_device(), linear_layers(model), tp)
    except ConfigError as error:
        return fp8.fp8_backend, f"fp8: not on this machine: {error}"
    return choice.backend.name, f"fp8: on this machine {choice.backend.name}: {choice.reason}"


def plan_fp8(fp8: Fp8Options, model: DecoderConfig, tp: int, layers: Table | None) -> list[str]:
    """Return what would compute in FP8 on this machine, or why that cannot, and how each layer's products run, a line each."""
    if layers is None:
        return []
    return [planned_backend(fp8, model, tp)[1]] + [f"  {line}" for line in in_words(layers)]
