"""Kill -9 random ranks of a real run at random moments, let torchrun start them again, and compare with an unbroken run.

    python -m benchmarks.faults                        30 kills of 2 ranks; several minutes
    python -m benchmarks.faults --kills 100 --ranks 4 --options "--tp 2 --pp 2 --schedule dualpipe"

Half of the kills wait until a checkpoint is being written. At the end the last checkpoint must hold the unbroken run's weights and
optimizer states bit for bit and metrics.jsonl its losses, and no process, unfinished folder or shared memory may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.options import at_least
from parallax.checkpoint.find import list_checkpoints
from parallax.checkpoint.manifest import read_manifest

ROOT = Path(__file__).parents[1]


def start(folder: Path, out: Path, options: argparse.Namespace, restarts: int) -> subprocess.Popen:
    """Start the run under torchrun."""
    launcher = ["--standalone", f"--nproc-per-node={options.ranks}", f"--max-restarts={restarts}"]
    words = (
        f"--steps {options.steps} --save-every 2 --keep 2 --eval-every 0 --log-every 1 --out {out} {options.options}"
    )
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(ROOT / "pretrain.py"), *shlex.split(words)]
    environment = os.environ | {"PARALLAX_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    log = (folder / f"{out.name}.log").open("a")
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that the launcher has started and that train."""
    found = []
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                if b"pretrain.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
            except OSError:
                continue
    return found


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line has `text` in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def newest_step(out: Path) -> int:
    return max((step for step, _ in list_checkpoints(out / "checkpoints")), default=0)


def kill_one(launcher: subprocess.Popen, out: Path, chance: random.Random, last_step: int) -> str | None:
    """Kill a rank at a random moment after some progress; return when that was, None if the run ended before."""
    target, during_a_save = newest_step(out) + chance.randrange(1, 6), chance.random() < 0.5
    while newest_step(out) < min(target, last_step):
        if launcher.poll() is not None:
            return None
        time.sleep(0.01)
    deadline = time.monotonic() + 30
    while during_a_save and not list((out / "checkpoints").glob("step-*.partial")):
        if launcher.poll() is not None or time.monotonic() > deadline:
            return None
    time.sleep(chance.random() * 0.05)
    ranks = ranks_of(launcher.pid)
    if not ranks:
        return None
    try:
        os.kill(chance.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:
        return None
    return "during a save" if during_a_save else "between saves"


def sums(out: Path) -> dict[str, tuple[str, ...]]:
    """Return the checksums of the newest checkpoint's weights and optimizer states."""
    _, path = list_checkpoints(out / "checkpoints")[0]
    files = read_manifest(path).files
    return {name: record.checksums for name, record in files.items() if name.startswith(("model/", "optimizer/"))}


def losses(out: Path) -> list[tuple[int, float]]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=at_least(1), default=30)
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="--layers 2 --hidden 64 --seq-len 32")
    options = parser.parse_args()
    options.steps = 8 * options.kills
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="parallax-faults-"))
    memory_before = set(os.listdir("/dev/shm"))
    print(json.dumps(describe_machine()))
    try:
        whole, broken = folder / "whole", folder / "broken"
        assert start(folder, whole, options, 0).wait() == 0, (folder / "whole.log").read_text()[-3000:]
        launcher = start(folder, broken, options, 2 * options.kills)
        moments: list[str] = []
        started = time.monotonic()
        while len(moments) < options.kills and launcher.poll() is None:
            moment = kill_one(launcher, broken, chance, options.steps - 2)
            if moment is not None:
                moments.append(moment)
                print(f"kill {len(moments)} {moment}, newest step {newest_step(broken)}", flush=True)
                ranks = ranks_of(launcher.pid)
                while launcher.poll() is None and set(ranks) & set(ranks_of(launcher.pid)):
                    time.sleep(0.1)  # until the launcher has started them all again
        assert launcher.wait() == 0, (folder / "broken.log").read_text()[-3000:]
        leftovers = [path.name for path in (broken / "checkpoints").iterdir() if path.name.endswith(".partial")]
        leftovers += [f"process {pid}" for pid in processes_with(str(broken))]
        print(
            f"{len(moments)} kills, {moments.count('during a save')} during a save, {time.monotonic() - started:.0f} s; "
            f"weights and states equal: {sums(whole) == sums(broken)}; "
            f"{len(losses(whole))} losses equal: {losses(whole) == losses(broken)}; "
            f"left over: {leftovers or 'nothing'}; new in /dev/shm, by whoever uses this machine: "
            f"{sorted(set(os.listdir('/dev/shm')) - memory_before) or 'nothing'}"
        )
        if sums(whole) != sums(broken) or losses(whole) != losses(broken) or leftovers:
            sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
