"""kernels/ is a folder at the top but a package only as parallax.kernels, in the checkout and in a wheel alike."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

setuptools = pytest.importorskip("setuptools", reason="needs setuptools, which builds the package")

ROOT = Path(__file__).parents[1]
OPERATORS = ["cross_entropy", "rms_norm", "swiglu"]


def run_python(program: str, folder: Path, *search: Path) -> str:
    """Return what a program prints that runs in a folder, with more folders at the end of the search path."""
    lines = ["import sys", f"sys.path += {[str(path) for path in search]}", program]
    arguments = [sys.executable, "-c", "\n".join(lines)]
    run = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_packages_are_those_below_parallax_and_the_kernels_are_among_them() -> None:
    packages = setuptools.find_namespace_packages(str(ROOT), include=["parallax", "parallax.*"])
    assert {"parallax", "parallax.kernels", *(f"parallax.kernels.{name}" for name in OPERATORS)} <= set(packages)
    assert not [name for name in packages if name.split(".")[0] != "parallax"]
    assert 'find_namespace_packages(include=["parallax", "parallax.*"])' in (ROOT / "setup.py").read_text()


def test_the_kernels_folders_have_no_init_file_that_would_make_them_a_top_level_package() -> None:
    assert (ROOT / "parallax" / "kernels").resolve() == ROOT / "kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_import_kernels_from_the_checkout_finds_the_hugging_face_package_and_never_ours(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'theirs'\n")
    # The checkout comes first on the search path, as under torchrun.
    assert run_python("import kernels; print(kernels.whose)", ROOT, tmp_path) == "theirs"
    # Where no such package is installed, python makes an empty module of any folder; it has no file, by which libraries know.
    if importlib.util.find_spec("kernels") is None or importlib.util.find_spec("kernels").origin is None:
        assert run_python("import kernels; print(getattr(kernels, '__file__', None))", ROOT) == "None"
        program = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
        assert run_python(program, ROOT) == "False"


def build_wheel(folder: Path) -> Path:
    """Build a wheel of a copy of the sources, since building writes beside them."""
    if importlib.util.find_spec("wheel") is None and int(setuptools.__version__.split(".")[0]) < 71:
        pytest.skip("setuptools before 70.1 needs the package wheel to build a wheel")
    sources = folder / "sources"
    sources.mkdir()
    shutil.copytree(ROOT / "parallax", sources / "parallax", symlinks=True)
    shutil.copytree(ROOT / "kernels", sources / "kernels")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    arguments = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(folder),
    ]
    run = subprocess.run(arguments, cwd=sources, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_holds_the_kernels_below_parallax_only_and_works_in_an_empty_folder(tmp_path: Path) -> None:
    wheel, empty, installed = build_wheel(tmp_path), tmp_path / "empty", tmp_path / "installed"
    names = zipfile.ZipFile(wheel).namelist()
    for operator in OPERATORS:
        assert {f"parallax/kernels/{operator}/{file}.py" for file in ("kernel", "reference")} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"parallax"}
    assert "parallax/py.typed" in names
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    program = f"sys.path.insert(0, {str(installed)!r})\nfrom parallax.kernels.swiglu import reference\nprint(reference.__file__)"
    assert run_python(program, empty) == str(installed / "parallax/kernels/swiglu/reference.py")
