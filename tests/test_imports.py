"""What may import what, read from the source: the order of the parts, and who may call torch.distributed.

kernels <- mesh, collectives, schedules <- precision <- tensor_parallel <- models, objectives, data, data_parallel,
pipeline (these do not import each other) <- layers, checkpoint <- training <- config, cli <- the entry points
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up; a module belongs to the longest prefix that fits. A part may import itself and every lower level.
LEVELS: list[set[str]] = [
    {
        "parallax.errors",
        "parallax.flags",
        "parallax.host_memory",
        "parallax.dtypes",
        "parallax.journal",
        "parallax.storage",
    },
    {"parallax.kernels"},
    # Schedules and all that is known of one without running it.
    {
        "parallax.mesh",
        "parallax.collectives",
        "parallax.mail",
        "parallax.shared_memory",
        "parallax.meeting",
        "parallax.roll_call",
        "parallax.start",
    }
    | {
        f"parallax.pipeline.{part}"
        for part in ("schedules", "actions", "check", "costs", "lower", "simulator", "split", "tables", "trace", "draw")
    },
    {"parallax.precision"},
    {"parallax.tensor_parallel"},
    {"parallax.models", "parallax.objectives", "parallax.data", "parallax.data_parallel", "parallax.pipeline"},
    {"parallax.layers", "parallax.checkpoint"},
    {"parallax.training"},
    {"parallax.config", "parallax.differences", "parallax.resolve", "parallax.job", "parallax.cli"},
    {"pretrain", "finetune_sft", "benchmarks"},
]
INDEPENDENT = LEVELS[5]  # these, though on one level, do not import each other
USERS_OF_TORCH_DISTRIBUTED = {"parallax.mesh", "parallax.collectives", "parallax.pipeline.transport"}
PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def find_modules() -> dict[str, Path]:
    """Return {module name: its file} for the library, the entry points and the benchmarks."""
    files = [ROOT / "pretrain.py", ROOT / "finetune_sft.py", *ROOT.glob("benchmarks/**/*.py")]
    files += [file for file in ROOT.glob("parallax/**/*.py") if ROOT / "parallax" / "kernels" not in file.parents]
    found = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files if file.exists()}
    for file in ROOT.glob("kernels/**/*.py"):
        found[".".join(["parallax", *file.relative_to(ROOT).with_suffix("").parts])] = file
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


MODULES = find_modules()
TREES = {name: ast.parse(file.read_text(encoding="utf-8"), str(file)) for name, file in MODULES.items()}


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """Yield (imported module, line number) of every import in a module, also those inside functions."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}:{node.lineno}: write the whole name of what is imported"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES or node.module == "torch" else node.module), node.lineno


def part_of(module: str) -> str | None:
    """Return the prefix in LEVELS that a module belongs to."""
    parts = [part for level in LEVELS for part in level if module == part or module.startswith(part + ".")]
    return max(parts, key=len, default=None)


def level_of(part: str) -> int:
    return next(number for number, level in enumerate(LEVELS) if part in level)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_every_module_has_a_place_in_the_order() -> None:
    homeless = [module for module in MODULES if module != "parallax" and part_of(module) is None]
    assert not homeless, f"give {homeless} a level in LEVELS"
    assert {"parallax.kernels.rms_norm.kernel", "parallax.mesh"} <= MODULES.keys()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module: str) -> None:
    own = part_of(module)
    for imported, line in imports_of(module):
        part = part_of(imported)
        if part is None or own is None or part == own:
            continue
        where = f"{module}:{line} imports {imported}"
        assert level_of(part) <= level_of(own), f"{where}, which is above it"
        assert not {part, own} <= INDEPENDENT, f"{where}: {part} and {own} must not know each other"


def test_only_the_mesh_the_collectives_and_the_transport_call_torch_distributed() -> None:
    for module, tree in TREES.items():
        # The benchmarks hold what others build directly on torch.distributed.
        if module in USERS_OF_TORCH_DISTRIBUTED or is_in(module, "benchmarks"):
            continue
        for imported, line in imports_of(module):
            assert not is_in(imported, "torch.distributed"), f"{module}:{line} imports {imported}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.distributed", f"{module}:{node.lineno} uses torch.distributed"


def test_nothing_is_pickled_or_unpickled() -> None:
    for module, tree in TREES.items():
        for imported, line in imports_of(module):
            pickles = imported.split(".")[0] in PICKLING_MODULES or imported in ("torch.load", "torch.save")
            assert not pickles, f"{module}:{line} imports {imported}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                assert name not in ("torch.load", "torch.save"), f"{module}:{node.lineno} uses {name}"
                # torch's collectives on objects (all_gather_object, broadcast_object_list) pickle them.
                assert not name.endswith(("_object", "_object_list")), f"{module}:{node.lineno} uses {name}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", f"{module}:{node.lineno} allows pickles"


@pytest.mark.parametrize(
    "modules",
    [
        "parallax",
        "parallax.errors, parallax.mesh, parallax.resolve",
        "parallax.checkpoint.verify, parallax.checkpoint.find, parallax.cli.main",
        ", ".join(sorted(name for name in MODULES if name.endswith(".options"))),
    ],
)
def test_options_are_known_and_checkpoints_verified_without_importing_torch(modules: str) -> None:
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False", f"importing {modules} imports torch, which takes seconds"
