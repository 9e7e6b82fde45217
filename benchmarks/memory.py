"""Memory of a command and of all processes that it starts, by kind of process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil


def memory_of(root: psutil.Process, kinds: Mapping[str, str], field: str, other: str) -> list[tuple[str, int]]:
    """The kind and the bytes of `root` and of each process below it.

    `kinds` names the kind by a part of the command line. `field` is one of `/proc/PID/smaps_rollup`; its `Pss` fields
    count pages that several processes share once.
    """
    found = []
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
    for one in processes:
        try:
            name = " ".join(one.cmdline())[:200]
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
        except (psutil.Error, OSError):  # it has ended meanwhile
            continue
        size = next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)
        found.append((next((kind for part, kind in kinds.items() if part in name), other), size))
    return found
