"""From options to a train step: this rank's stage, its gradient buckets, its optimizer, and the pipeline around them."""

from __future__ import annotations

import torch

from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.optimizer import ShardedAdamW
from parallax.data_parallel.options import OptimizerOptions
from parallax.mesh import Mesh
from parallax.models.config import DecoderConfig
from parallax.models.decoder import StageSpec, build_stage
from parallax.pipeline.schedules import SCHEDULES
from parallax.pipeline.transport import ActivationSpec
from parallax.tensor_parallel.facts import named_parameters_with_facts
from parallax.training.options import ParallelOptions, TrainingOptions
from parallax.training.step import Objective, StageRunner, TrainStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_train_step(
    mesh: Mesh,
    model: DecoderConfig,
    layers: list[range],
    parallel: ParallelOptions,
    training: TrainingOptions,
    optimizer: OptimizerOptions,
    objective: Objective,
) -> TrainStep:
    """Return this rank's train step, with the initial weights of the seed; called by every rank of the world.

    layers: of each pipeline stage, as `stage_ranges` gives them.
    """
    sequence_parallel = parallel.sp and mesh.tp is not None
    stage = build_stage(
        model,
        StageSpec(layers[mesh.pp_rank], mesh.pp_rank, len(layers)),
        seed=training.seed,
        device=mesh.device,
        dtype=DTYPES[training.precision],
        tp=mesh.tp,
        sequence_parallel=sequence_parallel,
        recompute=training.recompute,
    )
    parameters = list(named_parameters_with_facts(stage, mesh.tp))
    buckets = GradientBuckets(parameters, mesh, zero=optimizer.zero)
    num_micro_batches = training.global_batch // (training.micro_batch * mesh.layout.dp)
    schedule = SCHEDULES[parallel.schedule](mesh.layout.pp, num_micro_batches)
    length = training.seq_len // mesh.layout.tp if sequence_parallel else training.seq_len
    spec = ActivationSpec((training.micro_batch, length, model.hidden_size), DTYPES[training.precision])
    return TrainStep(
        StageRunner(stage, objective, schedule, spec, mesh),
        parameters,
        buckets,
        ShardedAdamW(
            buckets,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        ),
        mesh,
        optimizer.clip_grad,
    )
