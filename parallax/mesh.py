"""Where each rank stands: Layout is pure numbers, Mesh adds the communication groups.

Ranks form a grid with named axes, tp varying fastest, so that the traffic that needs the fastest links stays in a node:

    global_rank = (pp_rank * dp + dp_rank) * tp + tp_rank

    pp   pipeline parallel: slices of layers       used by the pipeline executor
    dp   data parallel: other rows of the batch    used by the gradient buckets and ZeRO
    tp   tensor parallel: slices of each matrix    used by the parallel layers

A parameter may be held by several ranks for other reasons than dp: replicated over tp, KV heads shared by neighbours
in tp, tied embeddings on the first and the last stage. `Replicas` names such a set of holders, and `Mesh.holders` gives
its group: one notion for gradient sums, ZeRO sharding and counting a parameter once in the gradient norm.

An axis of size 1 has no group: None means "not parallel" to every layer and collective, and one process without a
launcher is a mesh of size 1 with no process group at all. Nothing here is global: main creates the mesh and passes it.
torch is imported only when a mesh is made, so that option parsing stays fast.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from parallax.errors import LostRank, exit_for_lost_rank, exit_with_problems
from parallax.journal import Journal

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from parallax.shared_memory import SharedMemory

AXES = ("pp", "dp", "tp")  # slowest varying first


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and the arithmetic between global ranks and positions along them."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, global_rank: int) -> dict[str, int]:
        """Return the rank along each axis of `global_rank`."""
        assert 0 <= global_rank < self.world_size, (global_rank, self)
        result = {}
        for axis in reversed(AXES):
            global_rank, result[axis] = divmod(global_rank, getattr(self, axis))
        return result

    def global_rank(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """Return the global rank at the given position."""
        return (pp * self.dp + dp) * self.tp + tp

    def ranks_along(self, axes: Iterable[str], global_rank: int) -> tuple[int, ...]:
        """Return, in ascending order, the ranks that differ from `global_rank` at most along `axes`."""
        axes = set(axes)
        here = self.coordinates(global_rank)
        span = {axis: range(getattr(self, axis)) if axis in axes else (here[axis],) for axis in AXES}
        return tuple(self.global_rank(pp, dp, tp) for pp in span["pp"] for dp in span["dp"] for tp in span["tp"])


@dataclass(frozen=True)
class Replicas:
    """Which ranks hold a copy of a parameter, beyond its dp replicas.

    tp: number of neighbouring tp ranks that hold the same values (1: the parameter is sharded or tp is 1; the tp size:
        replicated everywhere; between: KV heads shared by tp / num_key_value_heads ranks).
    stages: pipeline ranks that hold it as well, when it lives on several (tied embeddings); empty: only its own stage.
    """

    tp: int = 1
    stages: tuple[int, ...] = ()

    def ranks(self, layout: Layout, global_rank: int) -> tuple[int, ...]:
        """Return all holders, ascending, of a parameter that `global_rank` holds."""
        here = layout.coordinates(global_rank)
        first = here["tp"] - here["tp"] % self.tp
        stages = self.stages or (here["pp"],)
        assert here["pp"] in stages, f"pipeline rank {here['pp']} holds a parameter said to live on {stages}"
        return tuple(
            layout.global_rank(pp, dp, tp)
            for pp in sorted(set(stages))
            for dp in range(layout.dp)
            for tp in range(first, first + self.tp)
        )


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks that communicate: the value that layers and collectives take.

    `rank` is this process's position in `ranks`. `process_group` is None in a plan made without processes; such a group
    gives sizes and positions, and refuses to communicate. `backward_process_group` is a second communicator over the
    same ranks: the pipeline's on NCCL, where each direction needs its own. `shared_memory` does the collectives of CPU
    tensors where all ranks are on one host; `why_not_shared` says why it is None. `journal` notes what is begun over it.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: ProcessGroup | None = None
    backward_process_group: ProcessGroup | None = None
    shared_memory: SharedMemory | None = None
    why_not_shared: str | None = None
    journal: Journal | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size}, global ranks {list(self.ranks)})"


def size_of(group: Group | None) -> int:
    """Return the number of ranks in `group`; None is the group of this process alone."""
    return 1 if group is None else group.size


def rank_of(group: Group | None) -> int:
    """Return this process's position in `group`; 0 for None."""
    return 0 if group is None else group.rank


@dataclass(eq=False)
class Mesh:
    """The layout seen from one rank, with a group per axis; a value that main creates and passes on."""

    layout: Layout
    rank: int
    device: torch.device
    connected: bool = False  # whether there are processes behind the groups
    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    timeout_seconds: float = 600.0  # how long a collective waits for the other ranks
    shared_memory: bool = True  # use it where possible; benchmarks say no
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        here = self.layout.coordinates(self.rank)
        self.tp_rank, self.pp_rank, self.dp_rank = here["tp"], here["pp"], here["dp"]
        # The same order on every rank: every process takes part in the creation of every group.
        self.world = self._group("world", [tuple(range(self.layout.world_size))])
        self.pp, self.dp, self.tp = (
            self._group(axis, [self.layout.ranks_along([axis], rank) for rank in range(self.layout.world_size)])
            for axis in ("pp", "dp", "tp")
        )
        if self.connected and self.device.type == "cuda":
            self.pp = self._with_backward_communicator(self.pp)

    def holders(self, replicas: Iterable[Replicas]) -> dict[Replicas, Group | None]:
        """Return the group of all holders, dp included, for each kind of replication on this rank.

        Called once by every rank of the world, with the kinds that its own parameters have.
        """
        from parallax.collectives import gather_json

        mine = set(replicas)
        rows = gather_json([[kind.tp, list(kind.stages)] for kind in mine], self._communicating_world(), self.device)
        kinds = sorted({(tp, tuple(stages)) for row in rows for tp, stages in row})
        result: dict[Replicas, Group | None] = {}
        for kind in (Replicas(tp, stages) for tp, stages in kinds):
            everywhere = [
                kind.ranks(self.layout, rank)
                for rank in range(self.layout.world_size)
                if not kind.stages or self.layout.coordinates(rank)["pp"] in kind.stages
            ]
            group = self._group(f"holders(tp={kind.tp}, stages={list(kind.stages)})", everywhere)
            if kind in mine:
                result[kind] = group
        return result

    def groups_of(self, name: str, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Group | None]:
        """Return the group of each of some sets of global ranks, ascending, that this rank is in; None for one alone.

        Called by every rank of the world at the same time; all members of a set must name it.
        """
        from parallax.collectives import gather_json

        mine = sorted(set(sets))
        rows = gather_json(mine, self._communicating_world(), self.device)
        self._group(name, {tuple(ranks) for row in rows for ranks in row})
        return {ranks: replace(self.groups[ranks], name=name) if ranks in self.groups else None for ranks in mine}

    def make_host_group(self, name: str) -> Group | None:
        """Return another group of all ranks, for host memory, which a thread may use while others use theirs; called by all."""
        if self.world is None or not self.connected:
            return None
        import torch.distributed as dist

        ranks = list(self.world.ranks)
        process_group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))
        return Group(name, self.world.ranks, self.rank, process_group)

    def make_store(self) -> Any:
        """Return a connection of its own to the store that all ranks share, for a thread; None if there is no other rank.

        Called by all ranks. Keys are those of this call: a launcher may keep one store for all starts of its processes.
        """
        if self.world is None or not self.connected:
            return None
        import torch.distributed as dist

        from parallax.collectives import gather_json

        token = gather_json(secrets.token_hex(8), self.world, self.device)[0]
        shared: Any = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"parallax/{token}", shared.clone())

    @staticmethod
    def has_lost_store(error: RuntimeError) -> bool:
        """Whether an error of a store of `make_store` says that nobody answers there any more, and not that it took long."""
        import torch.distributed as dist

        return isinstance(error, dist.DistNetworkError)

    def _communicating_world(self) -> Group | None:
        return self.world if self.connected else None

    def _group(self, name: str, partition: Iterable[tuple[int, ...]]) -> Group | None:
        """Create every set of ranks in `partition` that does not exist yet; return the one that this rank is in."""
        mine = None
        for ranks in sorted(set(partition)):
            if len(ranks) == 1:
                continue
            if ranks not in self.groups:
                process_group = self._process_group(ranks) if self.connected else None
                position = ranks.index(self.rank) if self.rank in ranks else -1
                group = Group(name, ranks, position, process_group, journal=self.journal)
                self.groups[ranks] = self._with_shared_memory(group)
            if self.rank in ranks:
                mine = replace(self.groups[ranks], name=name)  # the same ranks may be several axes
        return mine

    def _with_shared_memory(self, group: Group) -> Group:
        """Let the ranks of a gloo group that are all on this host meet in shared memory."""
        if group.rank < 0 or group.process_group is None or not self.shared_memory or self.device.type != "cpu":
            return group
        from parallax.collectives import gather_json
        from parallax.shared_memory import join

        gather = partial(gather_json, group=group)
        shared_memory, why_not = join(group.name, group.ranks, group.rank, gather, self.timeout_seconds)
        return replace(group, shared_memory=shared_memory, why_not_shared=why_not)

    def _with_backward_communicator(self, mine: Group | None) -> Group | None:
        import torch.distributed as dist

        for ranks in sorted({self.layout.ranks_along(["pp"], rank) for rank in range(self.layout.world_size)}):
            second = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if mine is not None and ranks == mine.ranks:
                mine = replace(mine, backward_process_group=second)
        return mine

    def _process_group(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        import torch.distributed as dist

        if len(ranks) == self.layout.world_size:
            return dist.group.WORLD
        return dist.new_group(list(ranks))


def plan_mesh(layout: Layout, rank: int) -> Mesh:
    """Return the mesh as `rank` would see it, with no process behind it: names, shapes and partition only."""
    import torch

    return Mesh(layout, rank, torch.device("meta"))


@contextmanager
def connect(layout: Layout, timeout_seconds: float = 600.0, *, shared_memory: bool = True) -> Iterator[Mesh]:
    """Join the launcher's other processes and yield the mesh; leave them at the end.

    Uses NCCL on one GPU per process where there are GPUs, gloo otherwise. Without a launcher (no WORLD_SIZE in the
    environment, or 1) the mesh has size 1 and no process group is created. shared_memory: let ranks on one host do their
    collectives there (parallax.shared_memory); without it, all go through gloo.

    A program of several ranks does best to end through `leave`. Exits with status 2 and a sentence when the launcher started
    another number of processes than the layout has.
    """
    import torch
    import torch.distributed as dist

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world_size != layout.world_size:
        needed = f"{layout} needs {_processes(layout.world_size)}, and {world_size} {'was' if world_size == 1 else 'were'} started"
        change = f"use torchrun --nproc-per-node {layout.world_size}, or another layout"
        exit_with_problems([f"{needed}; {change}"], os.path.basename(sys.argv[0]) or "parallax")
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Mesh(layout, 0, device)
        return
    if dist.is_initialized():
        yield Mesh(layout, rank, device, connected=True, timeout_seconds=timeout_seconds, shared_memory=shared_memory)
        return
    try:
        store = _launchers_store(rank, world_size, timeout_seconds)
        dist.init_process_group(
            "nccl" if use_gpu else "gloo",
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if use_gpu else None,
            **({} if store is None else {"store": store, "rank": rank, "world_size": world_size}),
        )
    except (dist.DistError, LostRank):
        exit_for_lost_rank(f"not all {world_size} ranks came to the start within {timeout_seconds:g} s")
    try:
        from parallax.roll_call import code_version, compare

        world = Group("world", tuple(range(world_size)), rank, dist.group.WORLD)
        asked = {f"--{axis}": getattr(layout, axis) for axis in ("tp", "pp", "dp")} | {"--timeout": timeout_seconds}
        compare(asked | code_version(), world, device)
        yield Mesh(layout, rank, device, connected=True, timeout_seconds=timeout_seconds, shared_memory=shared_memory)
    except LostRank as error:
        exit_for_lost_rank(str(error))  # at once: leaving the groups in order would wait for that rank
    finally:
        dist.destroy_process_group()


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _launchers_store(rank: int, world_size: int, timeout_seconds: float) -> Any:
    """Return the store that torchrun keeps over its restarts, with keys that belong to this start; None without one."""
    import torch.distributed as dist

    from parallax.start import agree_on_start

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    token = agree_on_start(dist.PrefixStore("parallax/start", store), rank, world_size, timeout_seconds)
    return dist.PrefixStore(f"parallax/{token}", store)


def leave(main: Callable[[], None]) -> NoReturn:
    """Run an entry point and end the process with its exit status, without the interpreter's own end where there are more ranks.

    A thread of gloo may still be letting go of the tensors of the last collective; when it needs the interpreter while that is
    being taken down, the process aborts, after all is done (pytorch pull request 179291).
    """
    status: int | str | None = 0
    try:
        try:
            main()
        except SystemExit as exit:
            status = exit.code
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = status or 1
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(status, str) else status or 0)
