"""`rl-vlm serve` for trainers that know nothing of us: they load adapters by HTTP, sample, and see which version
answered; and the same through Ray Serve's own proxy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from core_support import adapted_policy, outside_adapter, text_side
from peft import PeftModel
from ports import free_ports
from ray import serve
from transformers import AutoTokenizer

from rl_vlm.config import parse_config
from rl_vlm.runs.ray_session import ray_cluster
from rl_vlm.runs.serve_app import build

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from runs import REGISTRY, REPLICA, ServeProcess

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(400)]  # CI loads adapters as TRL does, in test_serve.py

QUESTION: list[Any] = [{"role": "user", "content": "How many shapes are there?"}]
TOKEN = "s3cret"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(tiny_folder: Path, root: Path) -> Iterator[ServeProcess]:
    settings = ("http.model_name=base", "serving.num_replicas=2", "serving.cpus_per_replica=0.1", "http.max_adapters=2")
    with ServeProcess(tiny_folder, *settings, f"http.adapter_root={root}") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def sample(client: openai.OpenAI, folder: Path, **options: Any) -> tuple[str | None, list[int], list[float]]:
    """The version that answered, its tokens and their log-probabilities."""
    asked = {"messages": QUESTION, "temperature": 1.0, "max_tokens": 24, "logprobs": True, "seed": 3, **options}
    answer = client.chat.completions.create(**asked)
    codec = text_side(folder).codec
    ids = {codec.token_bytes(number): number for number in reversed(range(text_side(folder).vocab_size))}
    content = answer.choices[0].logprobs.content
    return answer.system_fingerprint, [ids[bytes(one.bytes)] for one in content], [one.logprob for one in content]


def scored(peft: PeftModel, folder: Path, token_ids: list[int]) -> np.ndarray:
    """The tokens' log-probabilities by peft's own forward pass."""
    tokenizer, text = AutoTokenizer.from_pretrained(folder), text_side(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = peft(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1].float()
    logits[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = float("-inf")
    return logits.log_softmax(-1)[torch.arange(len(token_ids)), torch.tensor(token_ids)].numpy()


def test_a_trainer_loads_its_adapters_and_samples_with_each(
    server: ServeProcess, client: openai.OpenAI, root: Path, tiny_folder: Path
) -> None:
    seen = []
    for number, seed in enumerate((1, 2), 1):
        peft = outside_adapter(tiny_folder, seed)
        peft.save_pretrained(root / f"step-{seed}")
        body = {"lora_name": "mine", "lora_path": f"step-{seed}", "load_inplace": True}
        reply = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=120)
        assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
        for name in ("mine", "mine@latest", f"mine-v{number}"):
            version, token_ids, logprobs = sample(client, tiny_folder, model=name)
            assert version == f"mine-v{number}"
        assert len(token_ids) > 4
        np.testing.assert_allclose(logprobs, scored(peft, tiny_folder, token_ids), atol=1e-3)
        seen.append((token_ids, logprobs))
    assert seen[0] != seen[1]
    with pytest.raises(openai.NotFoundError, match="mine-v2") as caught:
        sample(client, tiny_folder, model="mine-v1")  # it is gone, and the error says what there is
    assert caught.value.code == "model_not_found"
    base = sample(client, tiny_folder, model="base")
    assert base[0] == "base" and base[1:] not in seen
    cards = {model.id: model for model in client.models.list()}
    assert [*cards] == ["base", "mine-v2", "mine"]
    assert (cards["mine"].parent, cards["mine"].root, cards["base"].parent) == ("base", "step-2", None)  # type: ignore[attr-defined]


def test_replicas_and_registries_that_die_get_the_adapters_again(
    server: ServeProcess, client: openai.OpenAI, root: Path, tiny_folder: Path
) -> None:
    outside_adapter(tiny_folder, 5).save_pretrained(root / "kept")
    httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "kept", "lora_path": "kept"}, timeout=120)
    before = sample(client, tiny_folder, model="kept")
    for title, count in ((REGISTRY, 1), (REPLICA, 2)):
        dead = {server.kill(title)}
        server.wait_until(
            lambda title=title, count=count, dead=dead: len({a.pid for a in server.actors(title)} - dead) == count,
            title,
        )
        assert {str(sample(client, tiny_folder, model="kept")) for _ in range(6)} == {str(before)}


def test_serves_own_proxy_reaches_the_model_the_policy_and_a_loaded_adapter(
    tiny_folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application that `serve run` starts, here without its command."""
    monkeypatch.setenv("RL_VLM_API_TOKEN", TOKEN)
    adapted_policy(tiny_folder, seed=1).payload(1).write(root / "policy")
    outside_adapter(tiny_folder, 7).save_pretrained(root / "loaded")
    (port,) = free_ports(1)
    overrides = ["serving.engine=transformers", "serving.num_replicas=1", "serving.cpus_per_replica=0.1"]
    arguments = {
        "model": str(tiny_folder), "adapter": str(root / "policy"),
        "overrides": [*overrides, "http.model_name=base", f"http.adapter_root={root}"],
    }  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with ray_cluster(parse_config({"resources": {"num_cpus": 4}})):
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(arguments), name="vlm")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=120)

        def load(path: str, **headers: str) -> httpx.Response:
            body = {"lora_name": "mine", "lora_path": path}
            return httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=headers, timeout=120)

        assert load("loaded").status_code == 401
        assert load("../policy", Authorization=f"Bearer {TOKEN}").status_code == 400
        assert load("loaded", Authorization=f"Bearer {TOKEN}").status_code == 200
        found = {name: sample(client, tiny_folder, model=name, temperature=0) for name in ("base", "policy", "mine")}
        assert [version for version, *_ in found.values()] == ["base", "policy-v1", "mine-v1"]
        assert len({tuple(token_ids) for _, token_ids, _ in found.values()}) == 3
        serve.shutdown()
