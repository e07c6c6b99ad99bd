"""Notice that a rank ended or stands still, and say which, in what step and in what each rank was, before all stop.

    with Watch(mesh) as watch:
        ...                          each rank posts its journal every second, from a thread, to the store that all share
        watch.stop_all(error)        when a communication failed: one rank tells, all end with status 5

A rank that ended is known by a post that grows old. One that stands still posts on, unless its whole process does; it is told
from those that wait for it by its journal: it is in no communication, or has been in its own for longest. A thread that finds its
own journal unchanged for nearly --timeout seconds does the same as a failed communication.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NoReturn

from parallax.errors import EXIT_LOST_RANK
from parallax.mesh import Mesh

_RANKS_PER_SECOND = 2000  # that post, so that one store keeps up with them
_EARLY_SECONDS = 5.0  # before --timeout is over: when a backend gives up by itself, all must have been told already
_SHOWN = 16  # groups of ranks with one state; a message must stay readable
_OLD_BEATS = 3  # without a post after which a process is taken for dead


@dataclass(frozen=True)
class Post:
    """What a rank says of itself. beat: number of the post; phase, doing: in words; waiting: in a communication; since: when it
    began, seconds since the epoch."""

    beat: int
    phase: str
    doing: str
    waiting: bool
    since: float


class Watch:
    """Watches from a thread for as long as it is entered; does nothing for a process alone."""

    def __init__(self, mesh: Mesh, beat_seconds: float | None = None) -> None:
        self._mesh, self._journal = mesh, mesh.journal
        self._ranks = mesh.layout.world_size
        self._beat_seconds = beat_seconds or max(1.0, self._ranks / _RANKS_PER_SECOND)
        self._limit = max(mesh.timeout_seconds / 2, mesh.timeout_seconds - _EARLY_SECONDS)
        self._store: Any = None
        self._beats = 0
        self._posting = threading.Lock()
        self._stopping = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        self._store = self._mesh.make_store()
        if self._store is not None:
            self._journal.enter(self._journal.phase)  # what came before took its own time
            self._post()
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._over.set()
            self._thread.join()

    def stop_all(self, reason: BaseException | str) -> NoReturn:
        """Tell what happened, from one rank, and end this process with status 5; every rank comes here, or ended before."""
        self._stopping.acquire()  # the watching thread and the training one may both come; the second waits for the end
        try:
            if self._store.add("fault", 1) == 1:
                print(self._describe(reason), file=sys.stderr, flush=True)
                self._store.set("told", "1")
            else:
                self._wait_until_told()
        except RuntimeError:  # the store was the process that ended, or its launcher
            print(f"parallax: rank {self._mesh.rank}: {reason}; this rank stops", file=sys.stderr, flush=True)
        os._exit(EXIT_LOST_RANK)

    def _run(self) -> None:
        fault, store_is_there = False, True
        while not self._over.wait(self._beat_seconds):
            # A store that is gone does not come back, and each attempt would leave lines of its own in the log.
            if store_is_there:
                try:
                    self._post()
                    fault = self._store.check(["fault"])
                except RuntimeError as error:
                    if self._mesh.has_lost_store(error):
                        store_is_there = False
                        self._say_alone()
            still = time.time() - self._journal.changed_at
            if still > self._limit:
                self.stop_all(f"nothing has happened for {still:.0f} s")
            if fault:
                self.stop_all("another rank stopped")

    def _say_alone(self) -> None:
        """Say that the launcher, which has the store, is gone; the training thread finds out about other ranks by itself."""
        if self._mesh.rank == 0 and not self._over.is_set():
            print(
                "parallax: the launcher has ended; training goes on, and SIGTERM to the ranks saves it",
                file=sys.stderr,
                flush=True,
            )

    def _post(self) -> None:
        with self._posting:
            self._beats += 1
            journal = self._journal
            post = Post(self._beats, journal.phase, str(journal), journal.waiting, journal.changed_at)
            self._store.set(f"post/{self._mesh.rank}", json.dumps(asdict(post)))

    def _wait_until_told(self) -> None:
        """Post on, to be known as alive, until one rank has told."""
        for _ in range(3 * (_OLD_BEATS + 1)):
            self._post()
            if self._store.check(["told"]):
                return
            time.sleep(self._beat_seconds)

    def _read(self) -> list[Post | None]:
        keys = [f"post/{rank}" for rank in range(self._ranks)]
        return [Post(**json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]

    def _describe(self, reason: BaseException | str) -> str:
        before = self._read()
        for _ in range(_OLD_BEATS):
            time.sleep(self._beat_seconds)
            self._post()
        return describe(before, self._read(), time.time(), str(reason))


def describe(before: Sequence[Post | None], after: Sequence[Post | None], now: float, reason: str) -> str:
    """Return the message: which ranks are to blame, and what each had begun last.

    before, after: the ranks' posts, read some beats apart. now: seconds since the epoch. reason: what this rank knows.
    """
    gone = [rank for rank, post in enumerate(after) if post is None or post == before[rank]]
    posts = {rank: post for rank, post in enumerate(after) if post is not None}
    alive = {rank: post for rank, post in posts.items() if rank not in gone}
    if gone:
        guilty, what = (
            gone,
            "ended, or their processes stand still" if len(gone) > 1 else "ended, or its process stands still",
        )
    else:
        computing = [rank for rank, post in alive.items() if not post.waiting]
        oldest = min((alive[rank].since for rank in computing or alive), default=now)
        guilty = [rank for rank in computing or alive if alive[rank].since <= oldest + 1.0]
        what = f"did not go on for {now - oldest:.0f} s"
    # The last post of a process that ended is from before: those that waited for it know better in which step that was.
    phases = Counter(alive[rank].phase for rank in (alive if gone else guilty) if rank in alive)
    where = f" in {phases.most_common(1)[0][0]}" if phases else ""
    lines = [f"parallax: {_ranks(guilty)} {what}{where}; all ranks stop. What each rank had begun last:"]
    states: dict[str, list[int]] = {}
    for rank in range(len(after)):
        post = posts.get(rank)
        doing = "nothing that it told" if post is None else f"{post.doing}, since {max(0.0, now - post.since):.0f} s"
        states.setdefault(doing + (" (no sign of life)" if rank in gone else ""), []).append(rank)
    # The guilty first, then the ranks in order.
    ordered = sorted(states.items(), key=lambda item: (item[1][0] not in guilty, item[1][0]))
    lines += [f"    {_ranks(ranks)}: {doing}" for doing, ranks in ordered[:_SHOWN]]
    if len(ordered) > _SHOWN:
        lines.append(f"    and {len(ordered) - _SHOWN} more kinds of states")
    lines.append(f"  noticed by: {reason}")
    lines.append("  The same command goes on from the newest checkpoint.")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 2-5"."""
    parts: list[str] = []
    start = 0
    for place, rank in enumerate(ranks):
        if place + 1 == len(ranks) or ranks[place + 1] != rank + 1:
            parts.append(str(rank) if ranks[start] == rank else f"{ranks[start]}-{rank}")
            start = place + 1
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
