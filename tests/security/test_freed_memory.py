"""Memory that a server has freed is the system's again, whatever small blocks lie between."""

from __future__ import annotations

import subprocess
import sys

# Large blocks that come and go raise glibc's limit for mappings; those that come then lie in the heap, others between them.
CODE = """
import ctypes, os
from rl_vlm.http.service import return_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
def block():
    place = libc.malloc(24 << 20)
    ctypes.memset(place, 1, 24 << 20)
    return place
CALL
libc.free(block())
before = resident()
blocks, kept = [], []
for _ in range(8):
    blocks.append(block())
    kept.append(libc.malloc(500_000))
for place in blocks:
    libc.free(place)
print(resident() - before)
"""


def left(call: str) -> int:
    """MiB that 192 MiB leave behind when they are freed."""
    code = CODE.replace("CALL", call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return int(done.stdout)


def test_freed_blocks_are_given_back() -> None:
    assert left("pass") > 100  # what glibc does by itself
    assert left("return_freed_memory()") < 24
