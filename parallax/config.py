"""The options of a run, composed from the dataclasses beside the code: as asked, and resolved.

PretrainOptions, FinetuneOptions   as asked on the command line, or in a --config file
PretrainConfig, FinetuneConfig     resolved by parallax.resolve: nothing left to derive
save                               config.json in --out, which --config reads again
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from parallax import flags
from parallax.data.chat.options import ChatOptions
from parallax.data.chat.options import check as check_chats
from parallax.data.options import DataOptions
from parallax.data.options import check as check_data
from parallax.data_parallel.options import OptimizerOptions
from parallax.mesh import Layout
from parallax.models.config import DecoderConfig, linear_layers
from parallax.models.options import FinetuneModelOptions, ModelOptions
from parallax.pipeline.actions import Schedule
from parallax.precision.options import Fp8Options
from parallax.storage import Location, is_address, location
from parallax.training.lr import FinetuneLearningRateOptions, LearningRateOptions
from parallax.training.options import FinetuneTrainingOptions, ParallelOptions, RunOptions, TrainingOptions
from parallax.training.safety import SafetyOptions
from parallax.training.stages import stage_ranges

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_RUN = Path("runs/tiny")  # what pretrain.py without options leaves


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


@dataclass(frozen=True)
class RunConfig(TrainOptions):
    """A run with nothing left to derive. `asked` are the options before that, `layout` and `model_config` what they give.

    init: the Hugging Face folder, or address, with the weights to start from; None: random weights.
    """

    asked: TrainOptions = field(default_factory=PretrainOptions)
    layout: Layout = field(default_factory=Layout)
    model_config: DecoderConfig = field(default_factory=DecoderConfig)
    init: Location | None = None

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
        """The folder of what the run reports: --out, or for an address a folder on this machine."""
        assert self.run.out is not None, "out is filled in when the options are resolved"
        place = location(self.run.out)
        return place if isinstance(place, Path) else Path("runs") / re.sub(r"[^\w.-]+", "-", place.address)

    @property
    def checkpoints(self) -> Location:
        """The folder, or address, of the run's checkpoints."""
        assert self.run.out is not None, "out is filled in when the options are resolved"
        return location(self.run.out) / "checkpoints"

    def describe_end(self) -> str:
        """Return what the run left where, in words."""
        if is_address(str(self.run.out)):
            return f"{self.checkpoints} holds the checkpoints, {self.out} metrics.jsonl and tensorboard/"
        return f"{self.out} holds metrics.jsonl, tensorboard/ and checkpoints/"

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
    def carried_from(self) -> Location | None:
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
