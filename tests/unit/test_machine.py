"""Cores and memory are those of the control group, of version 1 and 2, where they are fewer than the machine's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rl_vlm import machine
from rl_vlm.config import parse_config
from rl_vlm.runs.memory import remarks

GIB = 2**30


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a control group `/job` of version 2, and of version 1 for `cpu` and `memory`."""
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n0::/job/step\n")
    monkeypatch.setattr(machine, "OWN_GROUPS", own)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    whole = SimpleNamespace(total=512 * GIB, available=400 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_limits_the_machine_counts_and_a_quota_above_does(group: Path) -> None:
    write(group / "job/cpu.max", "max 100000\n")
    write(group / "job/memory.max", "max\n")
    assert machine.available_cores() == 64
    assert machine.available_memory() == (512 * GIB, 400 * GIB)
    write(group / "job/step/cpu.max", "400000 100000\n")
    write(group / "job/cpu.max", "200000 100000\n")
    assert machine.available_cores() == 2.0


def test_version_1_has_files_of_its_own(group: Path) -> None:
    write(group / "cpu/cpu.cfs_quota_us", "150000\n")  # a container sees its own group as the root
    write(group / "cpu/cpu.cfs_period_us", "100000\n")
    write(group / "memory/job/memory.limit_in_bytes", f"{16 * GIB}\n")
    write(group / "memory/job/memory.usage_in_bytes", f"{10 * GIB}\n")
    assert machine.available_cores() == 1.5
    assert machine.available_memory() == (16 * GIB, 6 * GIB)


def test_cached_files_are_free_memory(group: Path) -> None:
    write(group / "job/memory.max", f"{8 * GIB}\n")
    write(group / "job/memory.current", f"{7 * GIB}\n")
    write(group / "job/memory.stat", f"anon {2 * GIB}\nactive_file {GIB}\ninactive_file {4 * GIB}\n")
    assert machine.available_memory() == (8 * GIB, 6 * GIB)


@pytest.mark.parametrize(
    ("flags", "has"), [("fpu avx512f avx512_bf16", True), ("amx_bf16", True), ("asimd bf16", True), ("avx512f", False)]
)
def test_instructions_for_bfloat16_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, has: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.multiplies_bfloat16() is has
    said = {dtype: list(remarks(parse_config({"model": {"dtype": dtype}}))) for dtype in ("float32", "bfloat16")}
    assert not said["float32"] and any("model.dtype=float32" in one for one in said["bfloat16"]) is not has
