"""The options of a run: composed from the dataclasses beside the code, checked all at once, resolved.

command line, --config file  ->  PretrainOptions, FinetuneOptions   as asked
                                 check                              every user error at once, before torch is imported
                             ->  PretrainConfig, FinetuneConfig     resolved: nothing left to derive
                                 save                               config.json in --out, which --config reads again
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from parallax import flags
from parallax.checkpoint.find import find_model
from parallax.data.chat.encoder import DEFAULT_TEMPLATE, brings_template
from parallax.data.chat.options import ChatOptions
from parallax.data.chat.options import check as check_chats
from parallax.data.default_tokenizer import DEFAULT_VOCAB_SIZE
from parallax.data.options import DataOptions
from parallax.data.options import check as check_data
from parallax.data.tokenizer_source import find_tokenizer
from parallax.data_parallel.options import OptimizerOptions
from parallax.errors import ConfigError, exit_with_problems
from parallax.mesh import Layout
from parallax.models.config import DecoderConfig, linear_layers
from parallax.models.options import FinetuneModelOptions, ModelOptions, resolve_model
from parallax.models.presets import PRESETS
from parallax.pipeline.actions import Schedule
from parallax.pipeline.split import count_layers
from parallax.precision.options import Fp8Options
from parallax.training.lr import FinetuneLearningRateOptions, LearningRateOptions
from parallax.training.options import FinetuneTrainingOptions, ParallelOptions, RunOptions, TrainingOptions
from parallax.training.safety import SafetyOptions
from parallax.training.stages import stage_ranges

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_RUN = Path("runs/tiny")  # what pretrain.py without options leaves
_SWITCHES = {"--use-distributed-optimizer": ("--zero", "1")}  # of Megatron-LM


@dataclass(frozen=True)
class TrainOptions:
    """What every run is asked; `data` differs. program: the entry point, as messages name it."""

    program: ClassVar[str]

    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions | ChatOptions = field(default_factory=DataOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    learning_rate: LearningRateOptions = field(default_factory=LearningRateOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunOptions = field(default_factory=RunOptions)
    safety: SafetyOptions = field(default_factory=SafetyOptions)
    fp8: Fp8Options = field(default_factory=Fp8Options)

    def check_data(self) -> list[str]:
        """Return what is wrong with `data`, a sentence each."""
        raise NotImplementedError


@dataclass(frozen=True)
class PretrainOptions(TrainOptions):
    """Pretrain a language model.

    python pretrain.py trains a small one on the source of Python's standard library, with no download.

    torchrun --nproc-per-node 8 pretrain.py --tp 2 --pp 2 trains the same one in 8 processes, 2-way data parallel.

    Options have short names; Megatron-LM's are understood too.

    Exit status: 0 every step is done and saved; 1 an unforeseen error; 2 a wrong option; 3 --exit-after; 4 bad numbers; 5 another
    process ended or hung; 130 Ctrl-C; 138, 143 stopped by SIGUSR1, SIGTERM. After 3, 138 and 143 the run is saved.
    """

    program: ClassVar[str] = "pretrain.py"

    data: DataOptions = field(default_factory=DataOptions)

    def check_data(self) -> list[str]:
        problems = check_data(self.data)
        if self.data.valid and self.run.eval_every == 0:
            problems.append("--valid has no effect with --eval-every 0; leave one of them out")
        return problems


@dataclass(frozen=True)
class FinetuneOptions(TrainOptions):
    """Fine-tune a language model on chats.

    python finetune_sft.py teaches the model that python pretrain.py left to answer questions on Python's standard library.

    torchrun --nproc-per-node 4 finetune_sft.py --tp 2 --pp 2 --init FOLDER --data chats.jsonl starts from a Hugging Face model.

    Options have short names; Megatron-LM's are understood too.

    Exit status: 0 every step is done and saved; 1 an unforeseen error; 2 a wrong option; 3 --exit-after; 4 bad numbers; 5 another
    process ended or hung; 130 Ctrl-C; 138, 143 stopped by SIGUSR1, SIGTERM. After 3, 138 and 143 the run is saved.
    """

    program: ClassVar[str] = "finetune_sft.py"

    model: FinetuneModelOptions = field(default_factory=FinetuneModelOptions)
    data: ChatOptions = field(default_factory=ChatOptions)
    training: FinetuneTrainingOptions = field(default_factory=FinetuneTrainingOptions)
    learning_rate: FinetuneLearningRateOptions = field(default_factory=FinetuneLearningRateOptions)

    def check_data(self) -> list[str]:
        return check_chats(self.data)


Asked = TypeVar("Asked", bound=TrainOptions)


@dataclass(frozen=True)
class RunConfig(TrainOptions):
    """A run with nothing left to derive. `asked` are the options before that, `layout` and `model_config` what they give.

    init: the Hugging Face folder with the weights to start from; None: random weights.
    """

    asked: TrainOptions = field(default_factory=PretrainOptions)
    layout: Layout = field(default_factory=Layout)
    model_config: DecoderConfig = field(default_factory=DecoderConfig)
    init: Path | None = None

    @property
    def steps(self) -> int:
        assert self.training.steps is not None, "steps are filled in when the options are resolved"
        return self.training.steps

    @property
    def eval_steps(self) -> int:
        assert self.run.eval_steps is not None, "eval_steps are filled in when the options are resolved"
        return self.run.eval_steps

    @property
    def out(self) -> Path:
        assert self.run.out is not None, "out is filled in when the options are resolved"
        return Path(self.run.out).expanduser()

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that each rank takes through its stage in a step."""
        return self.training.global_batch // (self.training.micro_batch * self.layout.dp)

    @property
    def stage_ranges(self) -> list[range]:
        """The layers of each pipeline stage."""
        text, length = self.parallel.pipeline_layout, self.training.seq_len
        return stage_ranges(self.model_config, self.schedule.num_stages, text, length, self.layout.pp)

    @property
    def why_schedule(self) -> str | None:
        """Why --schedule auto took what it took; None if the schedule was asked for."""
        if self.parallel.schedule != "auto":
            return None
        return self.parallel.choose_schedule(self.num_micro_batches, self.model_config.num_hidden_layers).why

    @cached_property
    def schedule(self) -> Schedule:
        """What each pipeline rank does in a step."""
        return self.parallel.make_schedule(self.num_micro_batches, self.model_config.num_hidden_layers)

    @property
    def fp8_layers(self) -> dict[str, dict[str, str]] | None:
        """How the products of each linear layer run, {layer: {product: in words}}; None without --precision fp8."""
        if self.training.precision != "fp8":
            return None
        return self.fp8.recipe.table(linear_layers(self.model_config))

    @property
    def carried_from(self) -> Path | None:
        """The folder from which a checkpoint takes over what goes with a tokenizer: that of the initial weights, if it is its."""
        return self.init if self.asked.data.tokenizer is None else None

    def describe_start(self) -> str:
        """Return where the weights come from, in words."""
        if self.init is not None:
            return str(self.init)
        looked = isinstance(self.asked, FinetuneOptions) and self.asked.model == FinetuneModelOptions()
        return "fresh weights" + (
            f"; {DEFAULT_RUN} holds no checkpoint, python pretrain.py makes one" if looked else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds: `options` as asked, which --config reads, and what they came to."""
        known = flags.flags_of(type(self.asked))
        return {
            "program": self.asked.program,
            "init": self.asked.model.init,
            "options": flags.values_of(self.asked, known),
            "resolved": flags.values_of(self, {name: flag for name, flag in known.items() if self._is_used(flag)}),
            "model": dataclasses.asdict(self.model_config),
            **({} if self.fp8_layers is None else {"fp8_layers": self.fp8_layers}),
        }

    def _is_used(self, flag: flags.Flag) -> bool:
        """Whether an option is of a part of the run that there is."""
        return flag.path[0] != "fp8" or self.training.precision == "fp8"

    def save(self) -> None:
        """Write config.json into the run's folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def describe(self) -> Table:
        """Return a table of the resolved options for the terminal, a row per group."""
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        rows: dict[str, list[str]] = {}
        for flag in flags.flags_of(type(self.asked)).values():
            group, name = flag.path
            if not self._is_used(flag):
                continue
            value = getattr(getattr(self, group), name)
            if value is not None and value != () and value is not False and name not in ("world_size", "dry_run"):
                shown = (
                    "" if value is True else " " + " ".join(map(str, value if isinstance(value, tuple) else [value]))
                )
                rows.setdefault(group, []).append(f"{flag.name}{shown}")
        rows["model"] = [*rows["model"][:1], *_model_words(self.model_config)]
        for group, words in rows.items():
            table.add_row(group.replace("_", " "), "  ".join(words))
        return table


@dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """A pretraining run with nothing left to derive."""

    data: DataOptions = field(default_factory=DataOptions)


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """A fine-tuning run with nothing left to derive."""

    data: ChatOptions = field(default_factory=ChatOptions)


def _model_words(config: DecoderConfig) -> list[str]:
    from parallax.models.config import num_parameters

    return [
        f"layers {config.num_hidden_layers}",
        f"hidden {config.hidden_size}",
        f"heads {config.num_attention_heads}",
        f"kv-heads {config.num_key_value_heads}",
        f"ffn {config.intermediate_size}",
        f"vocab {config.vocab_size}",
        f"parameters {num_parameters(config):,}",
    ]


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
    if "config" in given:
        from_file, found = flags.read_file(given["config"][0], known)
        given, problems = from_file | given, found + problems
    return flags.build(kind, given, known, kind.program), problems


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
    data_problems = options.check_data()
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
    problems += options.fp8.check(training.precision)
    if model is not None and training.precision == "fp8":
        problems += options.fp8.check_model(linear_layers(model), training.seq_len)
        problems += options.fp8.check_key_value_heads(model.num_key_value_heads, layout.tp)
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


def _find_init(options: TrainOptions) -> tuple[Path | None, list[str]]:
    """Return the Hugging Face folder to start from, None for random weights, and what is wrong with --init."""
    given = options.model.init
    try:
        if given is not None:
            return (None if given == "none" else find_model(given)), []
    except ConfigError as error:
        return None, [f"--init {given}: {problem}" for problem in error.problems]
    if options.model != FinetuneModelOptions():
        return None, []
    try:
        return find_model(DEFAULT_RUN), []
    except ConfigError:
        return None, []


def _from(options: Asked, init: Path | None) -> Asked:
    """Return the options with what is not given taken from the folder to start from."""
    if init is None:
        return replace(options, model=replace(options.model, init=None))
    data = options.data
    if data.tokenizer is None:
        data = replace(data, tokenizer=str(init))
        if isinstance(data, ChatOptions) and data.template is None and not brings_template(init):
            data = replace(data, template=DEFAULT_TEMPLATE)
    return replace(options, data=data, model=replace(options.model, init=str(init)))


def _run_name(options: TrainOptions, init: Path | None) -> str:
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
