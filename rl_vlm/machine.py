"""The cores and the memory that this process may use: of its machine, its affinity and its control groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CPUINFO = Path("/proc/cpuinfo")
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores() -> float:
    """CPU cores: those of the affinity, or fewer by a quota, as containers and batch systems set it."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _groups("cpu"):
        match _numbers(folder / "cpu.max") or _numbers(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"):
            case [quota, period] if quota > 0 and period > 0:
                cores = min(cores, quota / period)
    return cores


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16. Without them it takes many times as long as float32."""
    return CPUINFO.exists() and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(CPUINFO.read_text().split())


def available_memory() -> tuple[int, int]:
    """Memory in bytes, (all, free), of the machine or of the smallest limit; cached files count as free."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder in _groups("memory"):
        match _numbers(folder / "memory.max", folder / "memory.current") or _numbers(
            folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"
        ):
            case [limit, used] if limit < memory.total:
                total, free = min(total, limit), min(free, limit - used + _cached(folder))
    return total, max(free, 0)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, of version 2 and of version 1."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():  # Linux alone has them
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controller if controllers else CGROUPS
            own = root / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _numbers(*files: Path) -> list[int]:
    """All numbers in the files; none where one is missing or says "max"."""
    try:
        return [int(word) for file in files for word in file.read_text().split()]
    except (OSError, ValueError):  # no such limit
        return []


def _cached(folder: Path) -> int:
    """Bytes of files in memory, which the kernel gives up when it needs them."""
    with suppress(OSError):  # not every system has this file
        return sum(map(int, re.findall(r"(?m)^(?:in)?active_file (\d+)", (folder / "memory.stat").read_text())))
    return 0
