"""Ranks behind links of a chosen rate: a network namespace for each, its link shaped by a token bucket (Linux, root).

    hub (a bridge)  --- veth, shaped in both directions ---  rank 0, 10.83.0.1
                    --- ...                                  rank 1, 10.83.0.2

Nothing outside the namespaces is touched: the bridge has a namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAMESPACE = "BENCHMARK_NAMESPACE"  # in a rank's environment: the namespace that is its own
_CLONE_NEWNET = 0x40000000
_BURST = 16 * 1024  # bytes that may leave at once


class NoNamespaces(Exception):
    """This machine does not let us make them."""


@contextmanager
def namespaces(count: int, bits_per_second: float | None) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """Yield for each rank what to put in front of its command, and its environment; None is a link without a limit.

    Raises NoNamespaces.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        raise NoNamespaces("links of a limited rate take root, and ip and tc of iproute2")
    stem = f"plx{os.getpid() % 10000}"
    names = [f"{stem}r{rank}" for rank in range(count)]
    hub = f"{stem}h"
    try:
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        for rank, name in enumerate(names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", hub, "link", "add", f"to{rank}", "type", "veth", "peer", "name", "veth0", "netns", name)
            _run("ip", "-n", hub, "link", "set", f"to{rank}", "master", "br0", "up")
            _run("ip", "-n", name, "address", "add", f"10.83.0.{rank + 1}/24", "dev", "veth0")
            _run("ip", "-n", name, "link", "set", "veth0", "up")
            if bits_per_second is not None:
                for where, device in ((name, "veth0"), (hub, f"to{rank}")):
                    rate = ("rate", f"{bits_per_second:.0f}bit", "burst", str(_BURST), "latency", "2000ms")
                    _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *rate)
        yield [
            (
                ["ip", "netns", "exec", name],
                {"MASTER_ADDR": "10.83.0.1", "GLOO_SOCKET_IFNAME": "veth0", NAMESPACE: name},
            )
            for name in names
        ]
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def enter(name: str) -> None:
    """Move this thread, and those that it starts from now on, to a namespace; what `ip netns exec` does for a command."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {name} cannot be entered")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(words)}: {done.stderr.strip()}")
