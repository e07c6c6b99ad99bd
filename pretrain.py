"""Pretrain a language model.

    python pretrain.py                                                one process
    torchrun --nproc-per-node 8 pretrain.py --tp 2 --pp 2             the same model in 8

A run, from top to bottom: options, data, mesh, model and optimizer, where to start, the loop. `--help` lists the options.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallax.config import PROGRAM, PretrainConfig, changes_that_matter, parse_pretrain
from parallax.data.prepare import PreparedData, prepare_data
from parallax.errors import ConfigError, exit_with_problems


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_pretrain(argv)
    if config.run.dry_run:
        from parallax.training.plan import make_plan, print_plan

        print_plan(
            make_plan(config.model_config, config.layout, config.parallel, config.training, config.optimizer.zero)
        )
        return
    try:
        data = prepare_data(config.data, config.training.seq_len)

        from parallax.mesh import connect

        with connect(config.layout, config.run.timeout) as mesh:
            train(config, data, mesh)
    except ConfigError as error:
        exit_with_problems(error.problems, PROGRAM)


def train(config: PretrainConfig, data: PreparedData, mesh) -> None:
    from parallax.checkpoint.parts import CheckpointParts
    from parallax.data.loader import BatchLoader
    from parallax.models.config import flops_per_token
    from parallax.objectives.next_token import NextToken
    from parallax.training.build import DTYPES, build_train_step
    from parallax.training.checkpoints import check_start, find_start, restore, save_to
    from parallax.training.fit import Evaluation, Run, fit
    from parallax.training.flops import peak_flops
    from parallax.training.lr import learning_rate
    from parallax.training.metrics import Metrics

    model, training = config.model_config, config.training
    identity = {"config": config.to_dict(), "data": data.train.fingerprint, "tokenizer": data.tokenizer.fingerprint}
    start = find_start(config.run.resume, config.out / "checkpoints", mesh)
    check_start(start, identity, changes_that_matter)

    objective = NextToken(model.vocab_size, mesh.tp)
    train_step = build_train_step(
        mesh, model, config.stage_ranges, config.parallel, training, config.optimizer, objective
    )
    parts = CheckpointParts(
        model, train_step.parameters, train_step.optimizer, data.tokenizer, dtype=DTYPES[training.precision]
    )
    state = restore(start, parts, mesh)

    batch = (training.seed, training.global_batch, training.micro_batch, mesh.dp_rank, mesh.layout.dp)
    loader = BatchLoader(data.train, *batch, pin_memory=mesh.device.type == "cuda")
    evaluation = None
    if data.eval is not None and config.run.eval_every:
        evaluation = Evaluation(BatchLoader(data.eval, *batch, shuffle=False), config.eval_steps)
    with Metrics(config.out, mesh.rank, config.steps, state.step) as metrics:
        if mesh.rank == 0:
            config.save()
            metrics.console.print(config.describe())
        fit(
            Run(
                config.run,
                config.steps,
                training.tokens_per_step,
                train_step,
                loader,
                evaluation,
                metrics,
                state,
                lambda step: learning_rate(step, config.learning_rate),
                save_to(config.out / "checkpoints", parts, identity, mesh),
                flops_per_token(model, training.seq_len),
                peak_flops(mesh.device, DTYPES[training.precision]) * mesh.layout.world_size,
            )
        )


if __name__ == "__main__":
    main()
