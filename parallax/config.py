"""The options of a pretraining run: composed from the dataclasses beside the code, checked all at once, resolved, compared.

command line, --config file  ->  PretrainOptions   as asked
                                 check             every user error at once, before torch is imported
                             ->  PretrainConfig    resolved: nothing left to derive
                                 save_config       config.json in --out, which --config reads again
                                 differences       what a resumed run was asked to do otherwise
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
from typing import TYPE_CHECKING, Any

from parallax import flags
from parallax.data.checksums import changed_files
from parallax.data.default_tokenizer import DEFAULT_VOCAB_SIZE
from parallax.data.options import DataOptions
from parallax.data.options import check as check_data
from parallax.data.tokenizer_source import find_tokenizer
from parallax.data_parallel.options import OptimizerOptions
from parallax.errors import ConfigError, exit_with_problems
from parallax.mesh import Layout
from parallax.models.config import DecoderConfig
from parallax.models.options import ModelOptions, resolve_model
from parallax.models.presets import PRESETS
from parallax.pipeline.actions import Schedule
from parallax.pipeline.split import count_layers
from parallax.training.lr import LearningRateOptions
from parallax.training.options import ParallelOptions, RunOptions, TrainingOptions
from parallax.training.safety import SafetyOptions
from parallax.training.stages import stage_ranges

if TYPE_CHECKING:
    from rich.table import Table

PROGRAM = "pretrain.py"
_SWITCHES = {"--use-distributed-optimizer": ("--zero", "1")}  # of Megatron-LM

# Options that leave the sequence of losses as it is, up to rounding; every other one changes the run. What data and tokenizer
# name is told by their fingerprints, not by their paths.
HARMLESS = frozenset(
    "data tokenizer valid tp pp dp sp schedule schedule_costs chunks pipeline_layout zero zero_group micro_batch recompute steps tokens "
    "out resume save_every log_every eval_every eval_steps trace_pipeline timeout config dry_run world_size "
    "keep keep_every exit_after on_bad_step spike_factor max_bad_steps".split()
)


@dataclass(frozen=True)
class PretrainOptions:
    """Pretrain a language model.

    python pretrain.py trains a small one on the source of Python's standard library, with no download.

    torchrun --nproc-per-node 8 pretrain.py --tp 2 --pp 2 trains the same one in 8 processes, 2-way data parallel.

    Options have short names; Megatron-LM's are understood too.

    Exit status: 0 every step is done and saved; 1 an unforeseen error; 2 a wrong option; 3 --exit-after; 4 bad numbers; 5 another
    process ended or hung; 130 Ctrl-C; 138, 143 stopped by SIGUSR1, SIGTERM. After 3, 138 and 143 the run is saved.
    """

    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    learning_rate: LearningRateOptions = field(default_factory=LearningRateOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunOptions = field(default_factory=RunOptions)
    safety: SafetyOptions = field(default_factory=SafetyOptions)


@dataclass(frozen=True)
class PretrainConfig(PretrainOptions):
    """A run with nothing left to derive. `asked` are the options before that, `layout` and `model_config` what they give."""

    asked: PretrainOptions = field(default_factory=PretrainOptions)
    layout: Layout = field(default_factory=Layout)
    model_config: DecoderConfig = field(default_factory=DecoderConfig)

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

    @cached_property
    def schedule(self) -> Schedule:
        """What each pipeline rank does in a step."""
        return self.parallel.make_schedule(self.num_micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds: `options` as asked, which --config reads, and what they came to."""
        known = flags.flags_of(PretrainOptions)
        return {
            "options": flags.values_of(self.asked, known),
            "resolved": flags.values_of(self, known),
            "model": dataclasses.asdict(self.model_config),
        }

    def save(self) -> None:
        """Write config.json into the run's folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def describe(self) -> Table:
        """Return a table of the resolved options for the terminal, a row per group."""
        from rich.table import Table

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        rows: dict[str, list[str]] = {}
        for flag in flags.flags_of(PretrainOptions).values():
            group, name = flag.path
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
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        flags.print_help(PretrainOptions, PROGRAM, quiet=os.environ.get("RANK", "0") != "0")
    options, problems = read_options(words)
    try:
        config = resolve(options, world_size_of(options))
    except ConfigError as error:
        problems += error.problems
    except (OSError, RuntimeError) as error:
        # Paths that the system cannot even look at: too long, a loop of links, the home of nobody.
        problems.append(f"a path among the options cannot be used: {error}")
    if problems:
        exit_with_problems(problems, PROGRAM)
    return config


def read_options(words: Sequence[str]) -> tuple[PretrainOptions, list[str]]:
    """Return the options that the words of a command line give, a --config file included, and what is wrong with them."""
    known = flags.flags_of(PretrainOptions)
    given, problems = flags.read_words(_written_out(words), known)
    if "config" in given:
        from_file, found = flags.read_file(given["config"][0], known)
        given, problems = from_file | given, found + problems
    return flags.build(PretrainOptions, given, known, PROGRAM), problems


def _written_out(words: Sequence[str]) -> list[str]:
    """Give the flags that Megatron-LM has as switches, and that stand alone here too, their values."""
    result: list[str] = []
    for position, word in enumerate(words):
        alone = words[position + 1 : position + 2] == [] or words[position + 1].startswith("--")
        result += _SWITCHES.get(word.replace("_", "-"), (word,)) if alone else (word,)
    return result


def world_size_of(options: PretrainOptions) -> int:
    """Return the number of processes: of the launcher, or to plan for in a dry run."""
    if options.run.dry_run:
        sizes = options.parallel
        return options.run.world_size or max(1, sizes.tp) * max(1, sizes.pp) * max(1, sizes.dp or 1)
    return int(os.environ.get("WORLD_SIZE", "1"))


def check(options: PretrainOptions, world_size: int) -> list[str]:
    """Return every user error in the options of a run of `world_size` processes, a sentence each, legal values included."""
    try:
        resolve(options, world_size)
    except ConfigError as error:
        return error.problems
    return []


def resolve(options: PretrainOptions, world_size: int) -> PretrainConfig:
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
    data_problems = check_data(options.data)
    tokenizer_size, tokenizer_problems = (None, []) if data_problems else _tokenizer_size(options.data)
    model_options = options.model
    if options.parallel.pipeline_layout is not None and model_options == ModelOptions():
        # Nothing else says how deep the model is.
        model_options = replace(model_options, layers=count_layers(options.parallel.pipeline_layout))
    model, model_problems = resolve_model(model_options, tokenizer_size, training.seq_len)
    problems += options.learning_rate.check(training.steps, model.hidden_size if model is not None else None)
    problems += options.optimizer.check(layout.dp) + data_problems + tokenizer_problems + model_problems
    if model is not None:
        problems += _check_stages(model, layout, options)
    run = options.run.resolved(_run_name(options.model.model))
    problems += replace(options.run, out=run.out).check(None if data_problems else options.data.nothing_held_out)
    problems += options.safety.check(options.run.save_every)
    if options.data.valid and options.run.eval_every == 0:
        problems.append("--valid has no effect with --eval-every 0; leave one of them out")
    if problems or model is None:
        raise ConfigError(problems)
    return PretrainConfig(
        parallel=replace(options.parallel, dp=layout.dp),
        model=model_options,
        data=options.data,
        training=training,
        learning_rate=options.learning_rate.resolved(training.steps, model.hidden_size),
        optimizer=options.optimizer,
        run=run,
        safety=options.safety,
        asked=options,
        layout=layout,
        model_config=model,
    )


def _run_name(model: str) -> str:
    """Return the name of a preset, or of the folder or file that --model names."""
    if model in PRESETS:
        return model
    path = Path(model).expanduser().resolve()
    return path.parent.name if path.name == "config.json" else path.stem


def _check_stages(model: DecoderConfig, layout: Layout, options: PretrainOptions) -> list[str]:
    """Return what keeps the model from being cut up in this layout."""
    training, text = options.training, options.parallel.pipeline_layout
    problems = model.check(layout, training.seq_len, options.parallel.sp, balanced=text is None)
    if problems or training.check(layout.dp):
        return problems
    try:
        schedule = options.parallel.make_schedule(training.global_batch // (training.micro_batch * layout.dp))
        stage_ranges(model, schedule.num_stages, text, training.seq_len, layout.pp)
    except ConfigError as error:
        return error.problems
    return []


def _tokenizer_size(options: DataOptions) -> tuple[int | None, list[str]]:
    """Return the number of ids of the tokenizer, without training the default one."""
    try:
        if find_tokenizer(options.tokenizer).kind == "default":
            return DEFAULT_VOCAB_SIZE, []
        from parallax.data.tokenizers import load_tokenizer

        return load_tokenizer(options.tokenizer).vocab_size, []
    except ConfigError as error:
        return None, error.problems


@dataclass(frozen=True)
class Difference:
    """An option, or a field of the model, that another run has otherwise. `harmless`: the losses are the same, to rounding."""

    name: str
    before: Any
    now: Any
    harmless: bool

    def __str__(self) -> str:
        if self.name in _FINGERPRINTS:
            return f"the {self.name} is not the same"
        if self.name in _FOLLOWING_STEPS:
            flag = f"--{self.name.replace('_', '-')}"
            return f"{flag} was {_shown(self.before)} and is now {_shown(self.now)}, which follows from --steps unless given"
        return f"{self.name.replace('_', '-')} was {_shown(self.before)} and is now {_shown(self.now)}"


# What a run's identity holds beside its options, and options whose default depends on another.
_FINGERPRINTS = frozenset({"data", "tokenizer"})
_DATA_CHANGED = "the data is not the same"  # said only where no file of it is known to differ
_FOLLOWING_STEPS = frozenset({"warmup_steps", "lr_decay_steps"})


def _shown(value: Any) -> str:
    return "unset" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """Return in what two runs differ, each a `PretrainConfig.to_dict()` with fingerprints, under their names, added to it."""
    before, now = (json.loads(json.dumps(saved)) for saved in (before, now))  # tuples become lists, as in a file
    pairs: list[tuple[str, Any, Any, bool]] = []
    for part in ("model", "resolved"):
        old, new = before.get(part, {}), now.get(part, {})
        for name in dict.fromkeys([*old, *new]):
            # The sizes of the model are compared as they came out, whichever option or file gave them.
            if part == "model" or name not in _MODEL_OPTIONS:
                pairs.append((name, old.get(name), new.get(name), part == "resolved" and name in HARMLESS))
    for name in dict.fromkeys([*before, *now]):
        if name not in ("model", "resolved", "options"):
            pairs.append((name, before.get(name), now.get(name), False))
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


_MODEL_OPTIONS = frozenset(entry.name for entry in dataclasses.fields(ModelOptions))


def changes_that_matter(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return, each as a clause, the differences that would make a resumed run another one."""
    found = [difference for difference in differences(before, now) if not difference.harmless]
    clauses = [str(difference) for difference in found if difference.name != "data_files"]
    for difference in found:
        if difference.name == "data_files" and (files := changed_files(difference.before or [], difference.now or [])):
            clauses = [*(clause for clause in clauses if clause != _DATA_CHANGED), *files]
    return clauses
