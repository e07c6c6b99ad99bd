"""How a checkpoint becomes one where it is stored, and how it goes.

On a file system it is written under another name, synced, and renamed. Behind an address nothing can be renamed: it is written
where it will be, beside the mark `partial`, and the manifest, which appears whole and last, makes it one. When it goes, the mark
comes first and the manifest goes next. So in both cases a cut at any moment leaves a checkpoint, or what no reader takes for one
and the next save removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from parallax.checkpoint.files import sync
from parallax.checkpoint.names import MANIFEST, MARK, PARTIAL, is_step
from parallax.storage import Location, RemotePath


def written_as(final: Location) -> Location:
    """Return the folder in which the checkpoint `final` is written."""
    return final if isinstance(final, RemotePath) else _partial(final)


def _partial(final: Path) -> Path:
    return final.with_name(final.name + PARTIAL)


def begin(final: Location, folders: Iterable[str]) -> None:
    """Remove what cut saves have left beside the checkpoint `final`; make the folder to write it in, `folders` in it."""
    if isinstance(final, RemotePath):
        remove_leftovers(final.parent)
        remove(final)
        (final / MARK).write_bytes(b"")
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    sync(final.parent.parent)  # its name may be new there
    remove_leftovers(final.parent)
    for name in folders:
        (_partial(final) / name).mkdir(parents=True)


def commit(final: Location) -> None:
    """Make a checkpoint of what was written, manifest included, in place of one that is there."""
    if isinstance(final, RemotePath):
        (final / MARK).remove()
        return
    written = _partial(final)
    for folder in (*(path for path in written.iterdir() if path.is_dir()), written):
        sync(folder)
    replaced = final.with_name(f"{final.name}.replaced{PARTIAL}")
    if final.exists():
        os.rename(final, replaced)
    os.rename(written, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(final: Location) -> None:
    """Remove what there is of a save that failed, as far as it can be."""
    try:
        if isinstance(final, RemotePath):
            remove(final)
        else:
            _remove(_partial(final))
    except OSError:
        pass  # the save's own error is told


def remove(path: Location) -> None:
    """Remove a checkpoint; raises OSError."""
    if isinstance(path, RemotePath):
        if path.is_dir():
            (path / MARK).write_bytes(b"")
            (path / MANIFEST).remove()
            path.remove()
        return
    leaving = path.with_name(f"{path.name}.removed{PARTIAL}")
    _remove(leaving)
    os.rename(path, leaving)
    _remove(leaving)


def remove_leftovers(root: Location) -> None:
    """Remove what saves and removals that were cut have left under `root`; raises OSError."""
    if isinstance(root, RemotePath):
        for folder in root.iterdir() if root.is_dir() else ():
            if is_step(folder.name) and is_cut(folder):
                folder.remove()
        return
    for leftover in root.glob(f"step-*{PARTIAL}"):
        name, _, _ = leftover.name.partition(".")
        if is_step(name):
            _remove(leftover)


def is_cut(folder: RemotePath) -> bool:
    """Whether this is what a save or a removal has left that was cut."""
    return (folder / MARK).is_file() and not (folder / MANIFEST).is_file()


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
