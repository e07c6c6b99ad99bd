"""Options of a pretraining run: names, resolution, every user error at once, what is saved and compared."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallax.config import FinetuneOptions, PretrainConfig, PretrainOptions
from parallax.differences import HARMLESS, changes_that_matter, differences
from parallax.errors import ConfigError
from parallax.flags import flags_of
from parallax.mesh import Layout
from parallax.models.presets import PRESETS
from parallax.resolve import check, parse_pretrain, read_options, resolve, world_size_of

ROOT = Path(__file__).parents[1]
FLAGS = flags_of(PretrainOptions)


def options_of(words: str) -> PretrainOptions:
    options, problems = read_options(words.split(), PretrainOptions)
    assert problems == []
    return options


def config_of(words: str = "", world_size: int = 1) -> PretrainConfig:
    return resolve(options_of(words), world_size)


def problems_of(words: str, world_size: int = 1) -> list[str]:
    options, problems = read_options(words.split(), PretrainOptions)
    return problems + check(options, world_size)


def test_the_default_run_needs_no_option() -> None:
    config = config_of()
    assert config.layout == Layout(1, 1, 1)
    assert config.model_config == dataclasses.replace(PRESETS["tiny"].resolved(), vocab_size=4096)
    assert (config.steps, config.num_micro_batches, config.eval_steps) == (100, 8, 8)
    assert config.out == Path("runs/tiny")
    assert config.optimizer.zero == 1
    assert (config.learning_rate.min_lr, config.learning_rate.warmup_steps) == (config.learning_rate.lr / 10, 10)


def test_data_parallel_is_what_is_left() -> None:
    config = config_of("--tp 2 --pp 2", 8)
    assert config.layout == Layout(2, 2, 2)
    assert config.parallel.dp == 2
    assert config.num_micro_batches == 4
    assert config_of("--tp 2 --pp 2 --dp 2", 8).layout == config.layout


@pytest.mark.parametrize(
    "pair",
    """
    tp=2 tensor-model-parallel-size=2; pp=2 pipeline-model-parallel-size=2; zero=1 use-distributed-optimizer; zero=0
    use-distributed-optimizer=0; sp sequence-parallel; no-sp no-sequence-parallel; layers=4 num-layers=4; hidden=64
    hidden-size=64; heads=4 num-attention-heads=4; kv-heads=2 num-query-groups=2; ffn=64 ffn-hidden-size=64; seq-len=64
    seq-length=64; micro-batch=1 micro-batch-size=1; global-batch=8 global-batch-size=8; steps=5 train-iters=5;
    warmup-steps=2 lr-warmup-iters=2; lr-decay-steps=50 lr-decay-iters=50; lr-schedule=wsd lr-decay-style=wsd;
    eval-every=5 eval-interval=5; eval-steps=2 eval-iters=2; log-every=5 log-interval=5; save-every=5 save-interval=5;
    out=x save=x
    """.replace("\n", " ").split(";"),
)
def test_the_names_of_megatron_are_understood(pair: str) -> None:
    ours, theirs = pair.split()
    assert options_of(f"--{ours}") == options_of(f"--{theirs}")
    if ours != "no-sp" and ours != "zero=1":
        assert options_of(f"--{ours}") != PretrainOptions()


def test_a_switch_of_megatron_stands_before_other_options() -> None:
    assert options_of("--use-distributed-optimizer --lr 0.1").optimizer.zero == 1
    for words, value in (("", "on"), ("--overlap-param-gather --lr 1", "on"), ("--overlap-param-gather off", "off")):
        assert options_of(words).optimizer.overlap_param_gather == value
    assert problems_of("--zero 0 --use-distributed-optimizer") == ["--zero is given twice, as 0 and as 1; give it once"]


@pytest.mark.parametrize(
    ("words", "world_size", "problem"),
    [
        ("--tp 2", 1, "--tp 2 --pp 1 takes a multiple of 2 processes, but there is 1; use torchrun --nproc-per-node 2"),
        (
            "--tp 2 --pp 2",
            6,
            "--tp 2 --pp 2 takes a multiple of 4 processes, but there are 6; use torchrun --nproc-per-node 4 or 8",
        ),
        (
            "--dp 3 --global-batch 18",
            8,
            "--tp 1 --pp 1 --dp 3 takes 3 processes, but there are 8; use torchrun --nproc-per-node 3",
        ),
        ("--tp 0", 1, "--tp 0 must be at least 1"),
        ("--tp 16 --heads 8 --kv-heads 8", 16, "--tp 16 must divide num_attention_heads=8; use 1, 2, 4 or 8"),
        ("--tp 2 --ffn 687", 2, "--tp 2 must divide --ffn 687; use --ffn 686 or 688"),
        ("--sp", 1, "--sp has no effect with --tp 1"),
        ("--schedule 2f2b", 1, "--schedule 2f2b is unknown; use gpipe, 1f1b, "),
        (
            "--pp 3 --schedule dualpipe",
            3,
            "schedule dualpipe needs an even number of ranks (--pp), not 3; use 2 or 4, or dualpipev",
        ),
        ("--pp 16", 16, "--pp 16 needs at least 16 layers, the model has 8"),
        ("--pp 2 --layers 8 --pipeline-layout Et*3|t*4L", 2, "--pipeline-layout"),
        (
            "--global-batch 15",
            1,
            "--global-batch 15 must be a multiple of --micro-batch 2 times dp 1, which is 2; use 14 or 16",
        ),
        ("--global-batch 2", 4, "--global-batch 2 must be a multiple of --micro-batch 2 times dp 4, which is 8; use 8"),
        ("--micro-batch 0", 1, "--micro-batch 0 must be at least 1"),
        ("--steps 0", 1, "--steps 0 must be at least 1"),
        ("--steps 10 --tokens 100", 1, "--steps 10 and --tokens 100 both say how long to train"),
        ("--seq-len 0", 1, "--seq-len 0 must be at least 1"),
        ("--tp 2 --sp --seq-len 33", 2, "--sp needs --seq-len 33 to divide by --tp 2; use 32 or 34"),
        ("--model gpt2-124m --seq-len 2048", 1, "--seq-len 2048 is longer than the model's 1024 positions"),
        ("--model gpt-5", 1, "--model gpt-5 is no preset and no file; use one of tiny, gpt2-124m"),
        ("--model gpt2-124m --kv-heads 4", 1, "--kv-heads 4 is not possible with --model gpt2-124m"),
        ("--heads 6 --kv-heads 6", 1, "--heads 6 must divide --hidden 256"),
        ("--kv-heads 3", 1, "--kv-heads 3 must divide --heads 8; use 1, 2, 4 or 8"),
        ("--vocab 4095", 1, "--vocab 4095 has no room for the 4096 ids of the tokenizer; use --vocab 4096 or more"),
        ("--vocab 0", 1, "--vocab 0 must be at least 1"),
        ("--precision fp16", 1, "--precision fp16 is unknown; use fp32, bf16 or fp8"),
        ("--recompute some", 1, "--recompute some is unknown; use none, selective or full"),
        ("--lr 0", 1, "--lr 0.0 must be above 0"),
        ("--min-lr 1", 1, "--min-lr 1.0 must be between 0 and --lr 0.001"),
        ("--warmup-steps 101", 1, "--warmup-steps 101 must be between 0 and the 100 steps"),
        ("--lr-schedule constant --min-lr 0", 1, "--min-lr has no effect with --lr-schedule constant"),
        ("--zero 7", 1, "--zero 7 is unknown; use 0, 1, 2 or 3"),
        ("--clip-grad -1", 1, "--clip-grad -1.0 must be 0, which turns it off"),
        ("--seed -1", 1, "--seed -1 must be between 0"),
        ("--eval-every -1", 1, "--eval-every -1 must be 0, which turns it off, or more"),
        ("--eval-steps 4 --eval-every 0", 1, "--eval-steps 4 has no effect with --eval-every 0"),
        ("--eval-fraction 0", 1, "--eval-fraction 0 holds out nothing to evaluate on; use --eval-every 0"),
        ("--world-size 8", 1, "--world-size goes with --dry-run only"),
        ("--timeout 0", 1, "--timeout 0.0 must be above 0 seconds"),
        ("--resume /no/such/checkpoint", 1, "--resume /no/such/checkpoint: there is no such checkpoint"),
        ("--out /proc/version/run", 1, "--out /proc/version/run cannot be written: /proc/version is a file"),
        ("--data /no/such/file", 1, "--data /no/such/file: there is no such file or folder"),
        ("--tokenizer /no/such/file", 1, "--tokenizer /no/such/file: there is no such file or folder"),
    ],
)
def test_each_user_error_is_one_sentence(words: str, world_size: int, problem: str) -> None:
    (found,) = problems_of(words, world_size)
    assert found.startswith(problem)
    assert "\n" not in found


def test_all_user_errors_come_at_once() -> None:
    problems = problems_of(
        "--tpp 2 --tp 3 --global-batch 7 --lr 0 --data /nope --out /proc/version --zero 7 --recompute x", 8
    )
    others = [problem.split()[0] for problem in problems if not problem.startswith("--tp 3")]
    assert others == "--tpp --recompute --global-batch --lr --zero --data --out".split()
    # The processes, the heads, the key-value heads and the MLP.
    assert sum(problem.startswith("--tp 3") for problem in problems) == 4


def test_an_unreadable_model_configuration_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (problem,) = problems_of(f"--model {tmp_path}/config.json")
    assert problem.startswith(f"--model {tmp_path}/config.json cannot be read as JSON")


def test_sizes_override_those_of_the_preset() -> None:
    model = config_of("--layers 3 --hidden 128 --heads 4 --kv-heads 2 --ffn 320 --vocab 5000").model_config
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads) == (3, 128, 4)
    assert (model.num_key_value_heads, model.head_dim, model.intermediate_size, model.vocab_size) == (2, 32, 320, 5000)


def test_what_follows_from_a_size_follows_it() -> None:
    assert config_of("--hidden 512").model_config.intermediate_size == 1376
    assert config_of("--hidden 512").model_config.head_dim == 64
    assert (
        config_of("--hidden 100 --heads 5 --kv-heads 5").model_config.intermediate_size == 272
    )  # 268.75 to a multiple of 16
    assert config_of("--model gpt2-124m --heads 6").model_config.num_key_value_heads == 6
    assert (
        config_of("--model qwen3-0.6b --hidden 512").model_config.head_dim == 128
    )  # its heads never filled the hidden size
    assert config_of("--model llama3-8b --seq-len 16384").model_config.max_position_embeddings == 16384


def test_the_vocabulary_is_the_tokenizers_only_where_the_model_has_none_of_its_own() -> None:
    assert config_of("--tokenizer bytes").model_config.vocab_size == 257
    assert config_of("--model gpt2-124m --tokenizer bytes").model_config.vocab_size == 50257
    assert config_of("--tokenizer bytes --vocab 300").model_config.vocab_size == 300


def test_tokens_become_whole_steps() -> None:
    assert config_of("--tokens 4097").steps == 3  # of 16 * 128 tokens
    assert config_of("--tokens 4096").steps == 2


def test_the_folder_is_named_after_the_model(tmp_path: Path) -> None:
    from parallax.models.hugging_face_config import to_hugging_face

    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hugging_face(PRESETS["tiny"].resolved(), "float32")))
    assert config_of(f"--model {folder}").out == Path("runs/my-model")
    assert config_of(f"--model {folder}/config.json").out == Path("runs/my-model")
    assert config_of("--model llama-1b").out == Path("runs/llama-1b")


def test_a_dry_run_takes_its_number_of_processes_from_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world_size_of(options_of("--dry-run --world-size 16384")) == 16384
    assert world_size_of(options_of("--dry-run --tp 2 --pp 4 --dp 3")) == 24
    assert world_size_of(options_of("--tp 2")) == 4
    (problem,) = problems_of("--dry-run --world-size 10 --tp 4", 10)
    assert problem.endswith("use --world-size 8 or 12, or other sizes")


def test_the_command_line_replaces_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('lr = 1e-3\nnum-layers = 4\nglobal_batch = 32\nprecision = "bf16"\n')
    options = options_of(f"--config {file} --layers 6 --seed 3")
    assert (options.model.layers, options.learning_rate.lr, options.training.global_batch) == (6, 1e-3, 32)
    assert (options.training.precision, options.training.seed) == ("bf16", 3)


def test_an_unknown_key_of_a_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("learning-rate = 1e-3\nhiden = 3\n")
    first, second = problems_of(f"--config {file}")
    assert first.startswith(f"{file}: learning-rate is no option")
    assert second == f"{file}: hiden is no option; the nearest is hidden"


def test_a_saved_configuration_starts_the_same_run_also_in_another_layout(tmp_path: Path) -> None:
    config = config_of(f"--out {tmp_path}/run --layers 4 --lr 1e-3 --tp 2 --sp --recompute full --eval-steps 3", 4)
    config.save()
    again = options_of(f"--config {tmp_path}/run/config.json")
    expected = dataclasses.replace(config, asked=again, run=dataclasses.replace(config.run, config=again.run.config))
    assert resolve(again, 4) == expected
    assert resolve(again, 8).layout == Layout(2, 1, 4)


def test_only_differences_that_change_the_losses_matter() -> None:
    before = config_of("--tp 2", 4).to_dict()
    harmless = config_of("--pp 2 --zero 0 --log-every 7 --micro-batch 1 --recompute full --out x --schedule gpipe", 4)
    found = differences(before, harmless.to_dict())
    assert {difference.name for difference in found} == {
        *("tp", "pp", "zero", "log_every", "micro_batch", "recompute", "out", "schedule")
    }
    assert changes_that_matter(before, harmless.to_dict()) == []
    for words in ("--lr 2e-3", "--seed 1", "--global-batch 32", "--seq-len 64", "--precision bf16", "--weight-decay 0"):
        assert changes_that_matter(before, config_of(f"--tp 2 {words}", 4).to_dict())
    assert changes_that_matter(before, config_of("--tp 2 --layers 9", 4).to_dict()) == ["layers was 8 and is now 9"]


def test_a_longer_run_is_the_same_run_only_with_the_same_decay() -> None:
    before = config_of("--steps 4").to_dict()
    assert changes_that_matter(before, config_of("--steps 8").to_dict()) == [
        "the learning rate would take another course, with --warmup-steps 2 and --lr-decay-steps 8 (of --steps unless given); "
        "add --warmup-steps 1 --lr-decay-steps 4",
    ]
    assert changes_that_matter(before, config_of("--steps 8 --lr-decay-steps 4").to_dict()) == []


def test_the_same_model_named_otherwise_is_the_same_model() -> None:
    assert changes_that_matter(config_of().to_dict(), config_of("--layers 8 --vocab 4096").to_dict()) == []


def test_the_same_folder_named_otherwise_is_the_same_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = config_of().to_dict() | {"init": "model"}
    for same in ("model", "model/", "./model", str(tmp_path / "model")):
        assert changes_that_matter(saved, saved | {"init": same}) == []
    for other in ("other", "none", None, "s3://bucket/model"):
        assert len(changes_that_matter(saved, saved | {"init": other})) == 1


@pytest.mark.parametrize(
    ("field", "change"),
    {
        "identity": lambda saved: [saved],
        "options": lambda saved: saved | {"options": 1},
        "resolved": lambda saved: saved | {"resolved": ["lr"]},
        "model": lambda saved: saved | {"model": "tiny"},
        "init": lambda saved: saved | {"resolved": saved["resolved"] | {"init": 7}},
        "data_files": lambda saved: saved | {"data_files": [["a.txt", 3, ["checksum"]]]},
    }.items(),
)
def test_a_saved_run_with_an_odd_field_is_another_run(field: str, change: Callable[[dict], Any]) -> None:
    saved = json.loads(json.dumps(config_of().to_dict()))
    assert changes_that_matter(saved, saved) == []
    assert changes_that_matter(change(saved), saved) == [f"its {field} is none that a run has"]


@pytest.mark.parametrize(
    "name", [".lock", "config.json", "metrics.jsonl", "skipped.jsonl", "checkpoints", "tensorboard"]
)
def test_what_is_in_the_way_of_a_run_is_told_before_it_trains(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    for make in (
        lambda: place.symlink_to(tmp_path / "nowhere"),
        lambda: place.touch() if name in ("checkpoints", "tensorboard") else place.mkdir(),
    ):
        make()
        (problem,) = problems_of(f"--out {tmp_path}")
        assert problem.startswith(f"--out {tmp_path} cannot be written: {place} is no f") and "move it away" in problem
        place.rmdir() if place.is_dir() else place.unlink()
    assert problems_of(f"--out {tmp_path}") == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", ""], "--out is empty; give a folder"),
        (["--resume", ""], "--resume is empty; give a folder"),
        (["--out", "memory://run"], "--out memory://run would be gone when its process ends; give a folder"),
        (
            ["--out", "file://run"],
            "file://run names another machine; a folder of this one is file:///folder, or its path",
        ),
    ],
)
def test_a_place_that_is_none_is_told(words: list[str], sentence: str) -> None:
    options, problems = read_options(words, PretrainOptions)
    assert any(sentence in problem for problem in problems + check(options, 1))


def test_fingerprints_are_compared_where_they_were_added() -> None:
    saved = config_of().to_dict()
    assert changes_that_matter(saved | {"data": "a"}, saved | {"data": "a"}) == []
    assert changes_that_matter(saved | {"data": "a"}, saved | {"data": "b"}) == ["the data is not the same"]


def test_of_fp8_only_what_an_option_can_undo_is_told() -> None:
    bf16, tile = config_of("--precision bf16").to_dict(), config_of("--precision fp8").to_dict()
    delayed = config_of("--precision fp8 --fp8-recipe delayed --fp8-format hybrid --fp8-keep layers.0").to_dict()
    assert changes_that_matter(bf16, delayed) == ["precision was bf16 and is now fp8"]
    assert changes_that_matter(tile, bf16) == ["precision was fp8 and is now bf16"]
    assert changes_that_matter(delayed, bf16) == [
        "precision was fp8 and is now bf16",
        "fp8-recipe was delayed and is now unset",
        "fp8-format was hybrid and is now unset",
        "fp8-keep was layers.0 and is now unset",
    ]
    assert changes_that_matter(tile, config_of("--precision fp8 --fp8-scales pow2").to_dict()) == [
        "fp8-scales was fp32 and is now pow2"
    ]
    assert changes_that_matter(tile, config_of("--precision fp8 --layers 9").to_dict()) == ["layers was 8 and is now 9"]
    other_table = tile | {"fp8_layers": delayed["fp8_layers"]}  # of another version of the program
    assert changes_that_matter(tile, other_table | {"data": "b"}) == [
        "the same options give another table of FP8 layers in this version of the program",
        "the data is not the same",
    ]


def test_every_name_that_is_called_harmless_is_an_option() -> None:
    assert {flag.path[1] for flag in FLAGS.values()} >= HARMLESS


def test_every_option_is_read_by_something_other_than_its_check() -> None:
    """An option that is parsed and never used is a fault (Megatron-LM 6305)."""
    read: set[str] = set()
    for file in [*ROOT.glob("parallax/**/*.py"), ROOT / "pretrain.py"]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        checks = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in ("check", "resolved")
            for inner in ast.walk(node)
        }
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in checks}
    assert {flag.path[1] for flag in FLAGS.values()} <= read | {"tokens"}  # --tokens becomes steps, and nothing else


def test_the_help_names_every_preset() -> None:
    from parallax.models import options

    assert options.__file__ is not None
    text = Path(options.__file__).read_text(encoding="utf-8")
    assert all(f"{name}," in text for name in PRESETS)


def run_python(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | environment,
    )


PARSE = "import sys; from parallax.resolve import parse_pretrain; parse_pretrain(); assert 'torch' not in sys.modules"


def test_options_are_parsed_and_checked_without_torch() -> None:
    result = run_python(PARSE, "--tp", "1", "--data", "pretrain.py", "--tokenizer", "bytes")
    assert result.returncode == 0, result.stderr


def test_help_comes_quickly_in_groups_with_the_short_name_first() -> None:
    started = time.perf_counter()
    result = run_python(PARSE, "--help")
    assert time.perf_counter() - started < 10  # of a busy machine; 0.2 of a quiet one
    assert result.returncode == 0
    for group in ("parallel", "model", "data", "training", "learning-rate", "optimizer", "run"):
        assert f"─ {group} options ─" in result.stdout
    assert "--tp INT, --tensor-model-parallel-size INT" in result.stdout
    assert "{None}" not in result.stdout


def test_user_errors_end_with_status_2_and_come_from_one_rank() -> None:
    first = run_python(PARSE, "--tpp", "2", RANK="0", WORLD_SIZE="2")
    assert (first.returncode, first.stdout) == (2, "")
    assert first.stderr == "pretrain.py: error: --tpp is no option; the nearest is --tp\n"
    # Another rank speaks only if no launcher has ended it meanwhile: then rank 0 does not have the problem.
    alone = "import time; time.sleep = lambda seconds: print('waited'); " + PARSE
    other = run_python(alone, "--tpp", "2", RANK="1", WORLD_SIZE="2")
    assert (other.returncode, other.stdout) == (2, "waited\n")
    assert other.stderr == "pretrain.py: error (rank 1): --tpp is no option; the nearest is --tp\n"


def test_parsing_uses_the_launchers_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert parse_pretrain(["--tp", "2"]).layout == Layout(2, 1, 4)


def test_resolving_raises_what_checking_returns() -> None:
    options = options_of("--tp 2")
    with pytest.raises(ConfigError) as caught:
        resolve(options, 1)
    assert caught.value.problems == check(options, 1)


def test_the_table_shows_what_was_resolved() -> None:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(config_of("--tp 2 --sp --hidden 512", 4).describe())
    shown = capture.get()
    for words in (
        "tp 2  pp 1  dp 2  sp",
        "hidden 512",
        "ffn 1376",
        "steps 100",
        "min-lr 0.0001",
        "out runs/tiny",
    ):
        assert words in shown


def test_every_option_is_read_by_something_besides_its_own_check() -> None:
    sources = [ROOT / "pretrain.py", ROOT / "finetune_sft.py", *(ROOT / "parallax").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for flag in (flags_of(PretrainOptions) | flags_of(FinetuneOptions)).values():
        group, name = flag.path
        # Read from another object than the options' own `self`, which is where checks read.
        readers = re.findall(rf"(?<!self)\.{name}\b", text)
        assert readers, f"--{flag.name} ({group}.{name}) is parsed and never used"


def test_what_other_programs_call_an_option_is_answered_with_its_name_here() -> None:
    for words, ours in {
        "--epochs 3": "--steps",
        "--output-dir x": "--out",
        "--batch-size 4": "--global-batch",
        "--bf16": "--precision",
        "--gradient_checkpointing": "--recompute",
        "--model-name-or-path x": "--init",
    }.items():
        _, problems = read_options(words.split(), PretrainOptions)
        assert problems == [f"{words.split()[0]} is no option; here it is {ours}"]


def test_the_options_of_the_other_program_are_refused_as_such(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"program": "pretrain.py", "options": {"document_attention": False}}))
    _, problems = read_options(["--config", str(file)], FinetuneOptions)
    assert problems == [
        f"--config {file} has the options of a run of pretrain.py, and this is finetune_sft.py; give one of its own"
    ]
    assert read_options(["--config", str(file)], PretrainOptions)[1] == []
