"""Memory that was freed is used again without asking the system for it; the user's own setting of the allocator stays."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

PROGRAM = """
import resource, sys
from parallax.host_memory import keep_freed_memory

def round():
    return len([bytes([number]) * (16 << 20) for number in range(4)])

print(sys.argv[1] == "keep" and keep_freed_memory())
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> tuple[str, int]:
    """Return what was set, and how many pages the system had to bring in one round."""
    command = [sys.executable, "-c", PROGRAM, how]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    was_set, count = done.stdout.split()
    return was_set, int(count)


def test_memory_that_was_freed_comes_back_without_page_faults() -> None:
    pages = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    was_set, kept = faults("keep")
    assert was_set == "True"
    assert kept < pages / 20
    _, default = faults("leave")
    assert default > pages / 2, "the C library keeps it by itself now: this module is not needed any more"


def test_what_the_user_set_of_the_allocator_stays() -> None:
    for name, value in (("MALLOC_TRIM_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=65536")):
        was_set, _ = faults("keep", **{name: value})
        assert was_set == "False", name
