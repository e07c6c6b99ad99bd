"""One rank of a measurement; started by benchmarks/schedules.py, says what it found as a line of JSON on rank 0."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    import torch

    from benchmarks.pipeline.contestants import Task, parallax, torch_pipelining
    from benchmarks.pipeline.waiting import find_unseen, sleep_precisely
    from parallax.collectives import all_reduce_, barrier
    from parallax.mesh import Layout, connect

    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    sleep_precisely()
    # Where links are measured nothing may pass through shared memory.
    with connect(Layout(tp=plan.get("tp", 1), pp=plan["pp"]), 120.0, shared_memory=not plan["over_links"]) as mesh:
        barrier(mesh.world)
        one = Task(**plan["contestants"][0][3])
        unseen = find_unseen(one.forward / 2, one.width, one.rows)
        barrier(mesh.world)
        contestants = {}
        for who, name, micro_batches, changes in plan["contestants"]:
            make = parallax if who == "parallax" else torch_pipelining
            contestants[who, name, micro_batches, json.dumps(changes)] = make(
                name, mesh, micro_batches, Task(**changes, unseen=unseen)
            )
        seconds: dict[tuple, list[float]] = {key: [] for key in contestants}
        for number in range(plan["rounds"] + 1):  # the first finds out shapes
            for key, contestant in contestants.items():
                contestant.times.waited.clear()
                barrier(mesh.world)
                started = time.perf_counter()
                contestant.step()
                taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
                work = torch.tensor([contestant.times.waited[kind] for kind in "FIW"], dtype=torch.float64)
                all_reduce_(taken, mesh.world, "max")
                all_reduce_(work, mesh.world)
                if number:
                    check(key, work.tolist(), plan)
                    seconds[key].append(taken.item())
        if mesh.rank == 0:
            print(f"PyTorch's own time around a wait: {unseen * 1e3:.2f} ms", file=sys.stderr)
            print(json.dumps([[*key[:3], json.loads(key[3]), times] for key, times in seconds.items()]), flush=True)


def check(key: tuple, work: list[float], plan: dict) -> None:
    """Every micro-batch has waited in every stage for each kind of work, once."""
    chunks = (
        2
        if key[1] in ("interleaved", "interleaved-paired", "zb-v", "dualpipev")
        or (key[0] == "torch" and key[1] != "1F1B")
        else 1
    )
    expected = key[2] * plan["pp"] * chunks * plan.get("tp", 1)
    assert all(abs(done - expected) < 1e-6 * expected for done in work), f"{key}: {work} is not {expected} of each"


if __name__ == "__main__":
    main()
