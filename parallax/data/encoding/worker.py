"""A process that turns blocks into ids, and how the pool talks to it: frames on its standard input and output.

    frame    number of bytes of the header, number of bytes of the payload      2 x uint64, little-endian
             header                                                             JSON
             payload                                                            text or ids as they are

Started as a program of its own, not forked: tokenizers have threads. It ends when its input does, so it does not outlive the
process that started it.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from typing import Any, BinaryIO

import numpy as np

from parallax.data.encoding.blocks import Block
from parallax.data.encoding.encode import Encoded, Rules, encode_block
from parallax.data.tokenizers import load_tokenizer

PREFIX = struct.Struct("<QQ")


def send(stream: BinaryIO, header: dict[str, Any], *payload: bytes) -> None:
    """Write a frame."""
    text = json.dumps(header).encode()
    stream.write(PREFIX.pack(len(text), sum(map(len, payload))) + text)
    for part in payload:
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Read a frame.

    Raises:
        EOFError: the stream has ended.
    """
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise EOFError
    header_bytes, payload_bytes = PREFIX.unpack(prefix)
    header, payload = stream.read(header_bytes), stream.read(payload_bytes)
    if len(payload) < payload_bytes:
        raise EOFError
    return json.loads(header), payload


def send_encoded(stream: BinaryIO, encoded: Encoded) -> None:
    """Write what came out of a block."""
    header = {"texts": len(encoded.lengths), "problems": encoded.problems, "num_empty": encoded.num_empty}
    send(stream, header, encoded.lengths.tobytes(), encoded.ends.tobytes(), encoded.content)


def receive_encoded(stream: BinaryIO) -> Encoded:
    """Read what came out of a block."""
    header, payload = receive(stream)
    texts = header["texts"]
    lengths = np.frombuffer(payload, np.int32, texts)
    ends = np.frombuffer(payload, np.bool_, texts, 4 * texts)
    problems = [(int(number), str(what)) for number, what in header["problems"]]
    return Encoded(payload[5 * texts :], lengths, ends, problems, header["num_empty"])


def main() -> None:
    """Answer each block with its ids; the first frame tells the tokenizer and the rules."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    source, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not come between the frames
    setup, _ = receive(source)
    tokenizer = load_tokenizer(setup["tokenizer"])
    tokenizer.max_threads = 1
    rules = Rules(**setup["rules"])
    send(results, {"fingerprint": tokenizer.fingerprint})
    while True:
        try:
            header, content = receive(source)
        except EOFError:
            return
        send_encoded(results, encode_block(Block(content=content, **header), tokenizer, rules))
