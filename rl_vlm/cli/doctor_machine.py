"""The checks of `rl-vlm doctor` on the machine itself: cores, memory, rendering, ports, caches, disks, services."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.version import InvalidVersion, Version

from rl_vlm.files import cache_place

Status = Literal["ok", "warn", "fail"]

GIB = 2**30
_PORTS = {
    8265: (
        "the Ray dashboard",
        "Another Ray may be running: set RAY_ADDRESS=auto to join it, or stop it with `ray stop`.",
    ),
    8000: (
        "Ray Serve's HTTP",
        "A training run opens no port; for a server, choose another port or stop the other program.",
    ),
    52365: (
        "the Ray dashboard agent",
        "Start Ray with --dashboard-agent-listen-port=0 beside another one, or `ray job submit` finds no agent.",
    ),
}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `remedy` says how to fix what is not ok."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def version_of(package: str) -> Version | None:
    """The installed version by the package's metadata, without importing it."""
    try:
        return Version(importlib.metadata.version(package))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def machine_checks() -> Iterator[Check]:
    """All checks that need no torch."""
    for part in (_machine, _rendering, _ports, _storage, _services):
        yield from part()


def _machine() -> Iterator[Check]:
    cores = available_cores()
    few = cores < 2
    yield Check(
        "cpu",
        "warn" if few else "ok",
        f"{cores:g} cores",
        "Runs work and take long: use two cores or more." if few else "",
    )
    total, free = available_memory()
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    if free < 4 * GIB:
        yield Check(
            "memory",
            "warn",
            detail,
            "Close other programs: Ray and the model need about 4 GiB even for the quickstart.",
        )
    else:
        yield Check("memory", "ok", detail)
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        detail = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
        if usage.free < GIB // 2:
            remedy = "Start the container with --shm-size=4g: Ray keeps its objects there and is slow without it."
            yield Check("/dev/shm", "warn", detail, remedy)
        else:
            yield Check("/dev/shm", "ok", detail)


def available_cores() -> float:
    """CPU cores that this process may use: its affinity and its control group's quota."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def available_memory() -> tuple[int, int]:
    """Memory in bytes, (all, free), within the control group's limit."""
    memory = psutil.virtual_memory()
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return memory.total, memory.available
    return min(limit, memory.total), min(limit - used, memory.available)


def _rendering() -> Iterator[Check]:
    libraries = {"egl": ctypes.util.find_library("EGL"), "osmesa": ctypes.util.find_library("OSMesa")}
    present = [name for name, library in libraries.items() if library]
    chosen = os.environ.get("MUJOCO_GL", "")
    detail = f"MUJOCO_GL {chosen or 'not set'}; found: {', '.join(present) or 'neither EGL nor OSMesa'}"
    install = "Install libegl1 libegl-mesa0 libgl1-mesa-dri (or libosmesa6) and set MUJOCO_GL=egl (or osmesa)"
    if version_of("mujoco") is None:
        yield Check("rendering", "ok", f"{detail} (only MuJoCo environments need it)")
    elif not present or (chosen in libraries and chosen not in present):
        yield Check("rendering", "warn", detail, f"{install} before you train on pictures of MuJoCo environments.")
    elif not chosen:
        yield Check(
            "rendering", "warn", detail, f"Set MUJOCO_GL={present[0]}: without a screen MuJoCo renders nothing else."
        )
    else:
        yield Check("rendering", "ok", detail)


def _ports() -> Iterator[Check]:
    for port, (purpose, remedy) in _PORTS.items():
        if port_is_free(port):
            yield Check(f"port {port}", "ok", f"free ({purpose})")
        else:
            yield Check(f"port {port}", "warn", f"in use ({purpose})", remedy)


def port_is_free(port: int) -> bool:
    """Whether a server could listen there on this machine."""
    with socket.socket() as probe:
        # As servers do: connections that were closed recently do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def hub_cache() -> Path:
    """Where the Hugging Face hub keeps models, by the rules of huggingface_hub, which is slow to import."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _storage() -> Iterator[Check]:
    cache = hub_cache()
    flags = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name)]
    held = len(list(cache.glob("models--*"))) if os.path.isdir(cache) else 0
    detail = f"{cache}, {held} models; {', '.join(flags) + ' set' if flags else 'online'}"
    if _can_write(cache):
        yield Check("hub cache", "ok", detail)
    else:
        yield Check("hub cache", "warn", f"{detail}; not writable", "Set HF_HOME to a folder that you may write to.")
    own = cache_place()
    if _can_write(own):
        yield Check("own cache", "ok", str(own))
    else:
        yield Check("own cache", "warn", f"{own}; not writable", "Set RL_VLM_CACHE to a folder that you may write to.")
    places = {"working folder": Path.cwd(), "hub cache": cache, "temporary files": Path(tempfile.gettempdir())}
    for name, place in places.items():
        free = shutil.disk_usage(_existing(place)).free
        status: Status = "fail" if free < GIB // 2 else "warn" if free < 5 * GIB else "ok"
        remedy = f"Free some space on the disk of {place}." if status != "ok" else ""
        yield Check(f"disk, {name}", status, f"{free / GIB:.1f} GiB free at {_existing(place)}", remedy)


def _can_write(folder: Path) -> bool:
    """Whether files can be written there, or the folder be made."""
    # os.path, since Path raises where a folder above may not be entered.
    found = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    return os.path.isdir(found) and os.access(found, os.W_OK)


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(place for place in (path, *path.absolute().parents) if os.path.isdir(place))


def _services() -> Iterator[Check]:
    # The key itself is never shown.
    if not os.environ.get("WANDB_API_KEY"):
        yield Check("wandb", "ok", "WANDB_API_KEY is not set: TensorBoard and files only")
    elif version_of("wandb") is None:
        yield Check(
            "wandb",
            "warn",
            "WANDB_API_KEY is set, wandb is not installed",
            "Run `pip install wandb`, or unset the key.",
        )
    else:
        yield Check("wandb", "ok", "WANDB_API_KEY is set: runs are also logged to Weights & Biases")
    address = os.environ.get("RAY_ADDRESS")
    yield Check(
        "ray cluster", "ok", f"RAY_ADDRESS is {address}" if address else "a private one (RAY_ADDRESS is not set)"
    )
