"""Dataclass fields as command-line flags: their names, and everything that is wrong with a command line, at once.

tyro makes the parser and the help from dataclasses whose fields lie beside the code that they are for. It stops at the first
mistake, in a box of its own; so the words are looked through here before, where every mistake becomes a sentence, with the
nearest flag for a name that is none. A configuration file is read into the same form, so that there is one way in:

    run.toml    tp = 2              {"tp": ["2"]}
    words       --pp 2 --lr 1e-3    {"pp": ["2"], "lr": ["1e-3"]}      the command line replaces what the file says
    together                        --tp=2 --pp=2 --lr=1e-3  ->  tyro  ->  the dataclasses

A flag is its field's name with dashes; `named` gives it more names. An option that is not set has no value in words.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Options = TypeVar("Options")
Given = dict[str, list[str]]  # flag name -> its values as written; "True" or "False" for a switch


def named(name: str, *others: str, metavar: str | None = None, default: str | None = None) -> Any:
    """Annotate a field with all names of its flag, its own first; what its value looks like; its default in words."""
    # tyro lists aliases before the name: to have the short name first in the help, the last one is given as the name.
    *aliases, last = (name, *others)
    hint = None if default is None else f"(default: {default})"
    return tyro.conf.arg(
        name=last, aliases=tuple(f"--{alias}" for alias in aliases), metavar=metavar, help_behavior_hint=hint
    )


@dataclass(frozen=True)
class Flag:
    """One option: its names without dashes, its own first; the group and field it sets; the type of a value.

    choices: the only legal values, if not empty. count: how many values it takes; None: one or more.
    """

    names: tuple[str, ...]
    path: tuple[str, str]
    kind: type
    choices: tuple[str, ...] = ()
    count: int | None = 1

    @property
    def name(self) -> str:
        return self.names[0]


def flags_of(options: type) -> dict[str, Flag]:
    """Return the flags, by their own name, of a dataclass whose fields are dataclasses: the groups of the help."""
    result: dict[str, Flag] = {}
    groups = typing.get_type_hints(options)
    for group in dataclasses.fields(options):
        hints = typing.get_type_hints(groups[group.name], include_extras=True)
        for field in dataclasses.fields(groups[group.name]):
            flag = _flag((group.name, field.name), hints[field.name])
            assert flag.name not in result, f"--{flag.name} is a field of two groups"
            result[flag.name] = flag
    return result


def _flag(path: tuple[str, str], hint: Any) -> Flag:
    names = [path[1].replace("_", "-")]
    if typing.get_origin(hint) is typing.Annotated:
        for note in hint.__metadata__:
            written = [*(getattr(note, "aliases", None) or ()), getattr(note, "name", None) or ""]
            names += [name.lstrip("-") for name in written if name]
        hint = hint.__origin__
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    choices: tuple[str, ...] = ()
    count: int | None = 1
    if typing.get_origin(hint) is typing.Literal:
        choices, hint = typing.get_args(hint), str
    elif typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        hint, count = kinds[0], None if kinds[-1] is Ellipsis else len(kinds)
    assert hint in (bool, int, float, str), f"{path}: options are of type bool, int, float or str, not {hint}"
    return Flag(tuple(dict.fromkeys(names)), path, hint, choices, count)


def read_words(words: Sequence[str], flags: Mapping[str, Flag], dashes: str = "--") -> tuple[Given, list[str]]:
    """Return what the words of a command line give to each flag, and what is wrong with them, a sentence each.

    `dashes` stands before names in the sentences.
    """
    known = {name: flag for flag in flags.values() for name in flag.names}
    switches = {f"no-{name}": flag for name, flag in known.items() if flag.kind is bool}
    given: Given = {}
    problems: list[str] = []
    last: Flag | None = None
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _names_option(word):
            reason = f"{dashes}{last.name} takes no value" if last and last.kind is bool else "options begin with --"
            problems.append(f"'{word}' belongs to no option; {reason}")
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        flag = known.get(name) or switches.get(name) if word.startswith("--") else None
        values = [value] if equals else []
        if not equals and (flag is None or flag.kind is not bool):
            limit = len(words) if flag is None or flag.count is None else position + flag.count
            while position < min(limit, len(words)) and not _names_option(words[position]):
                values.append(words[position])
                position += 1
        last = flag
        shown = word.partition("=")[0] if dashes else name
        if flag is None:
            problems.append(f"{shown} is no option{nearest(name, [*known, *switches], dashes)}")
            continue
        if flag.kind is bool:
            forms = f"--{flag.name} or --no-{flag.name}" if dashes else f"{flag.name} = true or {flag.name} = false"
            wrong = f"{shown} takes no value, it was given {value!r}; use {forms}" if equals else None
            values = [str(name in known)]
        else:
            wrong = _wrong(flag, values, shown)
        if wrong is not None:
            problems.append(wrong)
        elif flag.name in given:
            earlier, now = " ".join(given[flag.name]), " ".join(values)
            problems.append(f"{dashes}{flag.name} is given twice, as {earlier} and as {now}; give it once")
        else:
            given[flag.name] = values
    return given, problems


def _names_option(word: str) -> bool:
    return word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())


# What other programs call an option, where the spelling would lead astray.
_ELSEWHERE = {
    "lr": "learning-rate",
    "steps": "epochs num-epochs num-train-epochs max-steps num-steps iterations max-iters",
    "save-every": "save-steps save-freq",
    "eval-every": "eval-freq evaluation-steps",
    "log-every": "logging-steps log-freq",
    "out": "output-dir output output-path save-dir",
    "global-batch": "batch-size bs train-batch-size gradient-accumulation-steps accumulation-steps",
    "micro-batch": "per-device-train-batch-size",
    "weight-decay": "wd",
    "precision": "bf16 fp16 fp8 dtype amp mixed-precision",
    "seq-len": "max-length max-seq-len max-seq-length context-length block-size",
    "init": "model-name-or-path pretrained checkpoint load model-path",
    "data": "dataset train-file train-data",
    "recompute": "gradient-checkpointing activation-checkpointing",
    "resume": "resume-from-checkpoint",
    "lr-schedule": "scheduler lr-scheduler-type",
}


def nearest(name: str, names: Iterable[str], dashes: str) -> str:
    """Return the end of a sentence that says which of `names` was probably meant."""
    names = list(names)
    for ours, others in _ELSEWHERE.items():
        if name in others.split() and ours in names:
            return f"; here it is {dashes}{ours}"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    return f"; the nearest is {dashes}{close[0]}" if close else "; --help lists all options"


def _wrong(flag: Flag, values: Sequence[str], name: str) -> str | None:
    """Say what is wrong with the values of a flag that takes some."""
    if not values:
        return f"{name} needs a value"
    if flag.count is not None and len(values) != flag.count:
        return f"{name} takes {flag.count} value{'s' * (flag.count > 1)}, not {len(values)}"
    for value in values:
        if flag.choices and value not in flag.choices:
            return f"{name} {value} is unknown; use {' or '.join([', '.join(flag.choices[:-1]), flag.choices[-1]])}"
        if flag.kind is int and not _is_number(value, int):
            return f"{name} {value} is no whole number"
        if flag.kind is float and not _is_number(value, float):
            return f"{name} {value} is no number"
    return None


def _is_number(text: str, kind: type) -> bool:
    try:
        kind(text)
        return math.isfinite(float(text))
    except (ValueError, OverflowError):
        return False


def read_file(path: str, flags: Mapping[str, Flag], program: str | None = None) -> tuple[Given, list[str]]:
    """Return what a TOML or JSON file gives to each flag of `program`, and what is wrong with it, a sentence each.

    Keys are names of flags, with dashes or underscores. Of a JSON file that a run saved, "options" is read.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        table = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except FileNotFoundError:
        return {}, [f"--config {path}: there is no such file"]
    except OSError as error:
        return {}, [f"--config {path} cannot be read: {error.strerror}"]
    except (UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        return {}, [f"--config {path} is no valid {'JSON' if path.endswith('.json') else 'TOML'}: {error}"]
    if path.endswith(".json"):
        saved_by = table.get("program", program) if isinstance(table, dict) else program
        if program is not None and saved_by != program:
            return {}, [
                f"--config {path} has the options of a run of {saved_by}, and this is {program}; give one of its own"
            ]
        table = table.get("options", table) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            return {}, [f"--config {path} holds no table of options"]
    words: list[str] = []
    problems: list[str] = []
    for key, value in table.items():
        name = key.replace("_", "-")
        if name == "config":
            problems.append("config cannot name another file")
        elif isinstance(value, dict):
            problems.append(f"[{key}] is a table; options stand at the top level, as in: tp = 2")
        elif isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={value}")
    given, found = read_words(words, flags, dashes="")
    return given, [f"{path}: {problem}" for problem in problems + found]


def build(
    options: type[Options], given: Given, flags: Mapping[str, Flag], program: str, quiet: bool = False
) -> Options:
    """Return the dataclass with the given values; what is not given keeps its default."""
    words: list[str] = []
    for name, values in given.items():
        flag = flags[name]
        if flag.kind is bool:
            words.append(f"--{name}" if values == ["True"] else f"--no-{name}")
        elif flag.count == 1:
            words.append(f"--{name}={values[0]}")
        else:
            words += [f"--{name}", *values]
    return _tyro(options, words, program, quiet)


def print_help(options: type, program: str, quiet: bool = False) -> None:
    """Print the help, unless `quiet`, and exit with status 0."""
    _tyro(options, ["--help"], program, quiet)


def _tyro(options: type[Options], words: Sequence[str], program: str, quiet: bool) -> Options:
    return tyro.cli(options, prog=program, args=words, config=(tyro.conf.OmitArgPrefixes,), console_outputs=not quiet)


def values_of(options: Any, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Return {field name: value} of every option that is set, tuples as lists, as JSON and `read_file` have them."""
    result: dict[str, Any] = {}
    for flag in flags.values():
        group, field = flag.path
        value = getattr(getattr(options, group), field)
        if value is not None and value != ():
            result[field] = list(value) if isinstance(value, tuple) else value
    return result
