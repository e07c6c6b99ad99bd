"""The cache folder, and how something is built in it once although many processes want it at the same moment.

    rank 0..n:  folder there? -> use it
                lock free?    -> build into folder.partial, sync, rename to folder, release
                lock taken?   -> wait, look again

The lock is `flock`, which the kernel releases when its holder dies in whatever way, so a killed builder blocks nobody;
the next one removes what it left. The rename is atomic: a folder under its final name is complete. A build that fails
on a user's error leaves the sentences in the lock file, so that processes that were waiting say the same at once
instead of failing one after another.

One builder per file system: nodes with a cache folder of their own build one each, and get the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parallax.errors import ConfigError

CACHE_VARIABLE = "PARALLAX_CACHE"
WAIT_SECONDS = 2 * 3600
POLL_SECONDS = 0.05

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def cache_folder() -> Path:
    """Return $PARALLAX_CACHE, else parallax in $XDG_CACHE_HOME, else ~/.cache/parallax; it may not exist yet."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):  # a relative value is invalid and to be ignored, says the XDG specification
        return Path(base) / "parallax"
    try:
        return Path.home() / ".cache" / "parallax"
    except RuntimeError as error:
        raise ConfigError(
            f"this user has no home folder for the cache of data; set {CACHE_VARIABLE} to a writable folder."
        ) from error


def digest(*parts: bytes | str) -> str:
    """Hash the parts, with their boundaries, to 32 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def notify(text: str) -> None:
    """Tell the user, on standard error, what takes time or was left out. Only the process that builds does so."""
    print(f"parallax: {text}", file=sys.stderr, flush=True)


def build_once(folder: Path, build: Callable[[Path], None], what: str, wait_seconds: float = WAIT_SECONDS) -> Path:
    """Return `folder`, built by exactly one of the processes that ask for it.

    `build` fills the empty folder it is given. `what` names the result in the notices ("the tokenizer").

    Raises:
        ConfigError: the cache cannot be written, another process takes longer than `wait_seconds`, or `build` said so,
            in this process or in the one that was waited for.
    """
    if folder.is_dir():
        return folder  # also where the cache is read-only
    asked_at = time.time()
    with _exclusive(folder, wait_seconds) as lock:
        if folder.is_dir():
            return folder
        _raise_shared_failure(lock, asked_at)
        partial = folder.with_name(folder.name + ".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            started = time.monotonic()
            notify(f"preparing {what} (once; kept in {folder.parent}) ...")
            build(partial)
            _sync(partial)
            os.rename(partial, folder)
            _sync_one(folder.parent)
            notify(f"prepared {what} in {time.monotonic() - started:.1f} s")
        except ConfigError as error:
            _share_failure(lock, error)
            raise
        except OSError as error:
            if error.errno in _FULL:
                raise ConfigError(_cannot_write(folder.parent, error)) from error
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def _exclusive(folder: Path, wait_seconds: float) -> Iterator[int]:
    """Hold the lock beside `folder`; yield its file descriptor."""
    path = folder.with_name(folder.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(_cannot_write(folder.parent, error)) from error
    try:
        deadline = time.monotonic() + wait_seconds
        while not _try_lock(lock, path):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another process has held {path} for more than {wait_seconds:.0f} s; prepare large data once in a "
                    f"single process, or end that process, or set {CACHE_VARIABLE} to another folder."
                )
            time.sleep(POLL_SECONDS)
        yield lock
    finally:
        os.close(lock)  # also releases it


def _try_lock(lock: int, path: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(_cannot_write(path.parent, error)) from error
    return True


def _share_failure(lock: int, error: ConfigError) -> None:
    record = json.dumps({"time": time.time(), "problems": error.problems}).encode()
    os.ftruncate(lock, 0)
    os.pwrite(lock, record, 0)


def _raise_shared_failure(lock: int, asked_at: float) -> None:
    """Raise the error of a builder that failed while this process was waiting for it."""
    content = os.pread(lock, 1 << 20, 0)
    try:
        record = json.loads(content)
    except ValueError:
        return  # empty, or its writer was killed in the middle: then this process finds out for itself
    if record["time"] >= asked_at:
        raise ConfigError(record["problems"])


def _cannot_write(folder: Path, error: OSError) -> str:
    return (
        f"the cache folder {folder} cannot be used ({error.strerror or error}); "
        f"set {CACHE_VARIABLE} to a writable folder with enough room."
    )


def _sync(folder: Path) -> None:
    """Have the disk hold all files of `folder`, so that a rename seen after a power cut is of complete files."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
