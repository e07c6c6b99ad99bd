"""Blocks to ids in several processes, and back in the order of the blocks.

reader -> block 5   block 4    block 3
             |         |          |         a thread for each worker writes a block and waits for its ids
           worker    worker     worker
                                   |
writer <- block 1  block 2  block 3         taken in order; at most twice as many in flight as there are workers
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import parallax
from parallax.data.encoding.blocks import Block
from parallax.data.encoding.encode import Encoded, Rules, encode_block
from parallax.data.encoding.worker import receive, receive_encoded, send
from parallax.data.tokenizers import Tokenizer
from parallax.errors import ConfigError

Answer = TypeVar("Answer")

_PROGRAM = "import sys; sys.path[0:1] = [sys.argv[1]]; from parallax.data.encoding.worker import main; main()"


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_blocks(
    blocks: Iterator[Block], tokenizer: Tokenizer, rules: Rules, workers: int
) -> Generator[tuple[Block, Encoded], None, None]:
    """Yield each block with its ids, in order, the same for any number of workers; 0 works in this process.

    Worker processes open the tokenizer again, from where `load_tokenizer` found it; closing the generator ends them.

    Raises:
        ConfigError: reading the blocks says so, or a worker was ended from outside.
    """
    if workers == 0:
        for block in blocks:
            yield block, encode_block(block, tokenizer, rules)
        return
    crew = _start_crew(workers, tokenizer, rules)
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in crew:
        idle.put(worker)

    def work(block: Block) -> tuple[Block, Encoded]:
        worker = idle.get()
        try:
            return block, worker.encode(block)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(workers) as threads:
        pending: deque[Future[tuple[Block, Encoded]]] = deque()
        try:
            for block in blocks:
                pending.append(threads.submit(work, block))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            for worker in crew:
                worker.stop()


class _Worker:
    def __init__(self, tokenizer: Tokenizer, rules: Rules) -> None:
        # One thread each: there are as many workers as the user wants cores to work.
        one_thread = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(Path(parallax.__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | one_thread,
        )
        self._input, self._output = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._fingerprint = tokenizer.fingerprint
        send(self._input, {"tokenizer": tokenizer.given, "rules": asdict(rules)})

    def check(self) -> None:
        """Wait until it is ready."""
        header, _ = self._answer(receive)
        if header["fingerprint"] != self._fingerprint:
            raise ConfigError("the tokenizer's files changed while they were read; start again.")

    def encode(self, block: Block) -> Encoded:
        header = asdict(block)
        content = header.pop("content")
        with contextlib.suppress(BrokenPipeError):  # then the answer tells
            send(self._input, header, content)
        return self._answer(receive_encoded, f"{block.file} from line {block.first} on")

    def _answer(self, read: Callable[[BinaryIO], Answer], what: str = "the tokenizer") -> Answer:
        try:
            return read(self._output)
        except EOFError as error:
            status = self._process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise ConfigError(
                f"a worker process that was reading {what} ended with {how}; if that is 9, the memory was too small: "
                "use fewer --workers."
            ) from error

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()


def _start_crew(workers: int, tokenizer: Tokenizer, rules: Rules) -> list[_Worker]:
    crew = [_Worker(tokenizer, rules) for _ in range(workers)]
    try:
        for worker in crew:
            worker.check()
    except BaseException:
        for worker in crew:
            worker.stop()
        raise
    return crew
