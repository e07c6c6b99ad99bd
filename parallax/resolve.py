"""From the words of a command line to a run: parsed, checked all at once before torch is imported, resolved."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from parallax import flags
from parallax.checkpoint.find import find_model, tokenizer_of
from parallax.config import (
    DEFAULT_RUN,
    FinetuneConfig,
    FinetuneOptions,
    PretrainConfig,
    PretrainOptions,
    RunConfig,
    TrainOptions,
)
from parallax.data.default_tokenizer import DEFAULT_VOCAB_SIZE
from parallax.data.tokenizer_source import find_tokenizer
from parallax.errors import ConfigError, exit_with_problems
from parallax.mesh import Layout
from parallax.models.config import DecoderConfig, linear_layers
from parallax.models.options import FinetuneModelOptions, resolve_model
from parallax.models.presets import PRESETS
from parallax.pipeline.split import count_layers
from parallax.storage import Location
from parallax.training.stages import stage_ranges

# Of Megatron-LM, which has them as switches.
_SWITCHES = {
    "--use-distributed-optimizer": ("--zero", "1"),
    "--overlap-param-gather": ("--overlap-param-gather", "on"),
}

Asked = TypeVar("Asked", bound=TrainOptions)


def parse_pretrain(argv: Sequence[str] | None = None) -> PretrainConfig:
    """Return the run that the command line asks for; exit with status 2 and every user error, a sentence each.

    The number of processes is the launcher's WORLD_SIZE, 1 without one; with --dry-run it is --world-size.
    """
    config = _parse(PretrainOptions, argv)
    assert isinstance(config, PretrainConfig)
    return config


def parse_finetune(argv: Sequence[str] | None = None) -> FinetuneConfig:
    """Return the run that the command line asks for, as `parse_pretrain` does."""
    config = _parse(FinetuneOptions, argv)
    assert isinstance(config, FinetuneConfig)
    return config


def _parse(kind: type[TrainOptions], argv: Sequence[str] | None) -> RunConfig:
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        flags.print_help(kind, kind.program, quiet=os.environ.get("RANK", "0") != "0")
    options, problems = read_options(words, kind)
    try:
        config = resolve(options, world_size_of(options))
    except ConfigError as error:
        problems += error.problems
    except (OSError, RuntimeError) as error:
        # Paths that the system cannot even look at: too long, a loop of links, the home of nobody.
        problems.append(f"a path among the options cannot be used: {error}")
    if problems:
        exit_with_problems(problems, kind.program)
    return config


def read_options(words: Sequence[str], kind: type[Asked]) -> tuple[Asked, list[str]]:
    """Return the options that the words of a command line give, a --config file included, and what is wrong with them."""
    known = flags.flags_of(kind)
    given, problems = flags.read_words(_written_out(words), known)
    asked_here = [known[name].path for name in given]
    if "config" in given:
        from_file, found = flags.read_file(given["config"][0], known, kind.program)
        given, problems = from_file | given, found + problems
    options = flags.build(kind, given, known, kind.program)
    # Who asks for what is the default anyway, and forgets --precision fp8, must not train in another precision.
    defaults = {name for group, name in asked_here if group == "fp8"} - set(options.fp8.changed)
    return options, problems + options.fp8.without_effect(options.training.precision, sorted(defaults))


def _written_out(words: Sequence[str]) -> list[str]:
    """Give the flags that Megatron-LM has as switches, and that stand alone here too, their values."""
    result: list[str] = []
    for position, word in enumerate(words):
        alone = words[position + 1 : position + 2] == [] or words[position + 1].startswith("--")
        result += _SWITCHES.get(word.replace("_", "-"), (word,)) if alone else (word,)
    return result


def world_size_of(options: TrainOptions) -> int:
    """Return the number of processes: of the launcher, or to plan for in a dry run."""
    if options.run.dry_run:
        sizes = options.parallel
        return options.run.world_size or max(1, sizes.tp) * max(1, sizes.pp) * max(1, sizes.dp or 1)
    return int(os.environ.get("WORLD_SIZE", "1"))


def check(options: TrainOptions, world_size: int) -> list[str]:
    """Return every user error in the options of a run of `world_size` processes, a sentence each, legal values included."""
    try:
        resolve(options, world_size)
    except ConfigError as error:
        return error.problems
    return []


@overload
def resolve(options: PretrainOptions, world_size: int) -> PretrainConfig: ...
@overload
def resolve(options: FinetuneOptions, world_size: int) -> FinetuneConfig: ...
@overload
def resolve(options: TrainOptions, world_size: int) -> RunConfig: ...
def resolve(options: TrainOptions, world_size: int) -> RunConfig:
    """Return the run that `options` describe on `world_size` processes.

    Reads the small files that are named (model configuration, tokenizer) and looks at the data's paths, not at its text.
    Raises ConfigError with every user error.
    """
    flag = "--world-size" if options.run.dry_run else "torchrun --nproc-per-node"
    layout, problems = options.parallel.layout(world_size, flag)
    problems += options.parallel.check()
    training = options.training.resolved()
    problems += options.training.check(layout.dp)
    assert training.steps is not None
    init, init_problems = _find_init(options)
    asked, options = options, _from(options, init)
    options, run_problems = _with_tokenizer_of_run(options)
    data_problems = run_problems or options.check_data()
    tokenizer_size, tokenizer_problems = (None, []) if data_problems else _tokenizer_size(options.data.tokenizer)
    model_options = options.model
    if options.parallel.pipeline_layout is not None and model_options == type(model_options)():
        # Nothing else says how deep the model is.
        model_options = replace(model_options, layers=count_layers(options.parallel.pipeline_layout))
    model, model_problems = (
        (None, init_problems) if init_problems else resolve_model(model_options, tokenizer_size, training.seq_len)
    )
    problems += options.learning_rate.check(training.steps, model.hidden_size if model is not None else None)
    problems += options.optimizer.check(layout.dp) + data_problems + tokenizer_problems + model_problems
    if model is not None:
        problems += _check_stages(model, layout, options)
    run = options.run.resolved(_run_name(asked, init))
    problems += replace(options.run, out=run.out).check(None if data_problems else options.data.nothing_held_out)
    problems += options.safety.check(options.run.save_every)
    for flag, step in (("profile", options.run.profile), ("trace-pipeline", options.run.trace_pipeline)):
        if step is not None and training.steps is not None and step > training.steps:
            problems.append(
                f"--{flag} {step} is after the last step, which is {training.steps}; name one of the run's steps"
            )
    if options.optimizer.offload != "none" and options.safety.sync_save:
        problems.append(
            "--sync-save sends states from the GPU, where --offload optimizer has none; leave one of them out"
        )
    problems += options.fp8.check(training.precision, training.kernels)
    if model is not None and training.precision == "fp8":
        layers = linear_layers(model)
        problems += options.fp8.check_model(layers, training.seq_len, layout.tp)
        problems += options.fp8.check_key_value_heads(layers, model.num_key_value_heads, layout.tp)
    if problems or model is None:
        raise ConfigError(
            [problem.replace(f"--tokenizer {init}", f"the tokenizer of --init {init}") for problem in problems]
        )
    resolved: dict[str, Any] = {
        "parallel": replace(options.parallel, dp=layout.dp),
        "model": model_options,
        "training": training,
        "learning_rate": options.learning_rate.resolved(training.steps, model.hidden_size),
        "optimizer": options.optimizer,
        "run": run,
        "safety": options.safety,
        "fp8": options.fp8,
        "asked": asked,
        "layout": layout,
        "model_config": model,
        "init": init,
    }
    if isinstance(options, FinetuneOptions):
        return FinetuneConfig(data=options.data, **resolved)
    assert isinstance(options, PretrainOptions)
    return PretrainConfig(data=options.data, **resolved)


def _find_init(options: TrainOptions) -> tuple[Location | None, list[str]]:
    """Return the Hugging Face folder to start from, None for random weights, and what is wrong with --init."""
    given = options.model.init
    try:
        if given is not None:
            return (None if given == "none" else find_model(given)), []
    except ConfigError as error:
        return None, [f"--init {given}: {problem}" for problem in error.problems]
    except OSError as error:
        return None, [f"--init {given} cannot be read: {error}"]
    if options.model != FinetuneModelOptions():
        return None, []
    try:
        return find_model(DEFAULT_RUN), []
    except ConfigError:
        return None, []


def _from(options: Asked, init: Location | None) -> Asked:
    """Return the options with what is not given taken from the folder to start from."""
    if init is None:
        return replace(options, model=replace(options.model, init=None))
    data = options.data
    if data.tokenizer is None:
        data = replace(data, tokenizer=str(init))
    return replace(options, data=data, model=replace(options.model, init=str(init)))


def _with_tokenizer_of_run(options: Asked) -> tuple[Asked, list[str]]:
    """Return the options with a run or checkpoint that --tokenizer names as the folder of its model, and what is wrong with it."""
    try:
        found = tokenizer_of(options.data.tokenizer)
    except ConfigError as error:
        return options, error.problems
    return replace(options, data=replace(options.data, tokenizer=found)), []


def _run_name(options: TrainOptions, init: Location | None) -> str:
    """Return the name of the preset or folder that the model is from, and what is done with it unless that is pretraining."""
    model = options.model.model if init is None else options.model.init or str(DEFAULT_RUN)
    path = Path(model).expanduser().resolve()
    name = model if model in PRESETS else path.parent.name if path.name == "config.json" else path.stem
    if isinstance(options, FinetuneOptions):
        return f"{name}-sft"
    return name if init is None else f"{name}-pretrain"


def _check_stages(model: DecoderConfig, layout: Layout, options: TrainOptions) -> list[str]:
    """Return what keeps the model from being cut up in this layout."""
    training, text = options.training, options.parallel.pipeline_layout
    problems = model.check(layout, training.seq_len, options.parallel.sp, balanced=text is None)
    if problems or training.check(layout.dp):
        return problems
    try:
        num_micro_batches = training.global_batch // (training.micro_batch * layout.dp)
        schedule = options.parallel.make_schedule(num_micro_batches, model.num_hidden_layers)
        stage_ranges(model, schedule.num_stages, text, training.seq_len, layout.pp)
    except ConfigError as error:
        return error.problems
    return []


def _tokenizer_size(given: str | None) -> tuple[int | None, list[str]]:
    """Return the number of ids of the tokenizer, without training the default one."""
    try:
        if find_tokenizer(given).kind == "default":
            return DEFAULT_VOCAB_SIZE, []
        from parallax.data.tokenizers import load_tokenizer

        return load_tokenizer(given).vocab_size, []
    except ConfigError as error:
        return None, error.problems
