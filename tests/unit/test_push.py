"""`rl-vlm push` against a local stand-in of the hub's API: what arrives there, and what goes wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig
from PIL import Image
from ports import local_server

from rl_vlm.algorithms.checkpoint import write_state
from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import PolicyConfig, PreferenceConfig, load_config, save_config
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.preference.reward_model import RewardEnsemble
from rl_vlm.runs.push import HubError, push
from rl_vlm.runs.reward_model import RewardModel
from rl_vlm.types import UserInputError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class Hub:
    """Takes commits; `files` is what the last one holds, `created` the requests for repositories."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []
        self.status, self.url = 200, ""

    def reply(self, path: str, _: object, body: bytes) -> tuple[int, object]:
        return self.status, self.answer(path, body)

    def answer(self, path: str, body: bytes) -> object:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/me/counts", "name": "me/counts", "id": "me/counts"}
        if "/preupload/" in path:
            names = [one["path"] for one in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            for line in body.splitlines():
                one = json.loads(line)
                if one["key"] == "file":
                    self.files[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
            return {"commitUrl": f"{self.url}/me/counts/commit/{'1' * 40}", "commitOid": "1" * 40}
        if not body:
            return {"id": "me/counts", "sha": "0" * 40, "siblings": [], "name": "me", "type": "user", "orgs": []}
        return {"errors": [], "warnings": []}  # of a card's head


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    stand_in = Hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with local_server(stand_in.reply) as stand_in.url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", stand_in.url)
        yield stand_in


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    config = {"name": "counts", "model": {"path": "Qwen/Qwen3-VL-2B-Instruct", "lora": {"rank": 4, "alpha": 8}}}
    save_config(PolicyConfig.model_validate(config), folder / "config.yaml")
    state = {"base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(4, 8)}
    lora = LoraConfig(r=4, lora_alpha=8, base_model_name_or_path="/home/me/models/qwen")
    AdapterPayload.build(1, state, lora).write(folder / "adapter")
    names = ("accuracy", "accuracy_low", "accuracy_high", "items")
    measured = {0: (0.25, 0.15, 0.35, 64), 200: (0.875, 0.775, 0.975, 64)}
    rows = [
        {"iteration": iteration, **{f"{name}/default": value for name, value in zip(names, values, strict=True)}}
        for iteration, values in measured.items()
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "curve.png").write_bytes(b"\x89PNG")
    return folder


def test_an_adapter_arrives_with_its_card(hub: Hub, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_vlm(["push", str(run_folder), "me/counts"]) == 0
    assert f"{hub.url}/me/counts" in capsys.readouterr().out
    assert hub.created[0]["name"] == "counts" and "private" in json.dumps(hub.created[0])  # its form differs by version
    assert hub.files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors", "curve.png"}
    assert hub.files["adapter_model.safetensors"] == (run_folder / "adapter/adapter_model.safetensors").read_bytes()
    # No path of the machine that trained it.
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "Qwen/Qwen3-VL-2B-Instruct"
    text = hub.files["README.md"].decode()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "Qwen/Qwen3-VL-2B-Instruct" and head["library_name"] == "peft"
    assert "| default | 0.250 [0.150, 0.350] | 0.875 [0.775, 0.975] | 64 |" in text
    assert "LoRA, rank 4" in text and "Shapes-v0" in text and "/home/me" not in text


def test_an_upload_that_the_hub_rejects_is_an_error(hub: Hub, run_folder: Path) -> None:
    hub.status = 403
    with pytest.raises(HubError, match="hf auth login"):
        push(run_folder, "me/counts", public=True)
    with pytest.raises(UserInputError, match="owner/name"):
        push(run_folder, "me/counts/more")


def test_a_reward_model_arrives_with_its_card_and_scores_as_before(hub: Hub, tmp_path: Path) -> None:
    run, fetched = tmp_path / "run", tmp_path / "fetched"
    overrides = {"preference.image_size": 64, "preference.reward_model.size": 2}
    config = load_config(
        CONFIGS / "rl_vlm_f/cartpole_tiny.yaml", [f"{key}={value}" for key, value in overrides.items()]
    )
    assert isinstance(config, PreferenceConfig)
    checkpoint = run / "checkpoints/step-00000500"
    checkpoint.mkdir(parents=True)
    fetched.mkdir()
    save_config(config, run / "config.yaml")
    trained = RewardEnsemble((64, 64, 3), config.preference.reward_model, seed=3)
    trained.save(checkpoint / "reward_model.safetensors")
    write_state(checkpoint, {"step": 500})
    (run / "progress.csv").write_text("iteration,reward_model/accuracy,labels/accuracy\n500,0.75,0.9\n1000,0.8125,\n")
    push(run, "me/counts")
    assert hub.files.keys() == {"README.md", "reward_model.safetensors", "reward_model.json"}
    text = hub.files["README.md"].decode()
    assert "RewardModel.load" in text and "| accuracy on its labels | 0.812 |" in text
    assert "| labels that agree | 0.900 |" in text and str(tmp_path) not in text
    for name, content in hub.files.items():
        (fetched / name).write_bytes(content)
    frames = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    expected = trained.rewards(frames)
    for folder in (run, fetched):
        assert np.array_equal(RewardModel.load(folder).score([Image.fromarray(frames[0]), *frames[1:]]), expected)
    assert len(set(expected.tolist())) == 3


def test_a_folder_without_a_reward_model_for_pictures_is_named(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="holds no reward model"):
        RewardModel.load(run_folder)
    states = load_config(CONFIGS / "rl_vlm_f/cartpole_tiny.yaml", ["preference.reward_model.architecture=mlp"])
    save_config(states, tmp_path / "config.yaml")
    with pytest.raises(UserInputError, match="scores no pictures"):
        RewardModel.load(tmp_path)
