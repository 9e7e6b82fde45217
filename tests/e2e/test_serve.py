"""`rl-vlm serve` as users run it: OpenAI's client, an adapter by name, a replica that dies, SIGTERM."""

from __future__ import annotations

import base64
import io
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import requests
from accelerate import PartialState
from core_support import adapted_policy, outside_adapter
from PIL import Image
from runs import REPLICA, ServeProcess

pytestmark = pytest.mark.real
HI: list[Any] = [{"role": "user", "content": "How many shapes are there?"}]
# Seconds of work on any machine: hot samples of a random adapter end their turns rarely, and these are many.
LONG: dict[str, Any] = {"messages": HI, "max_tokens": 2000, "temperature": 2.0, "n": 256}


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter that changes the model a lot."""
    return adapted_policy(tiny_folder).payload(1).write(tmp_path_factory.mktemp("adapter") / "adapter")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where clients may load adapters from."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(tiny_folder: Path, adapter: Path, root: Path) -> Iterator[ServeProcess]:
    arguments = ("http.max_samples=256", "http.model_name=base", "http.drain_s=60", "--adapter", adapter)
    arguments = (*arguments, f"http.adapter_root={root}", "http.max_adapters=2")
    changes = {"LOCAL_MODEL_PATH": str(tiny_folder), "RL_VLM_API_TOKEN": "s3cret"}
    with ServeProcess(*arguments, **changes) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0)


def test_openais_client_works_unchanged(server: ServeProcess, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["policy", "policy-v1", "base"]
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "gray").save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    picture: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    arguments: dict[str, Any] = {
        "messages": [{"role": "user", "content": picture}],
        "temperature": 0,
        "max_tokens": 12,
        "n": 2,
        "logprobs": True,
    }
    answers = {}
    for model, fingerprint in (("policy", "policy-v1"), ("policy-v1", "policy-v1"), ("base", "base")):
        whole = client.chat.completions.create(model=model, **arguments)
        assert whole.system_fingerprint == fingerprint
        answers[model] = whole.choices[0].message.content
        assert all(token.logprob <= 0 for token in whole.choices[1].logprobs.content)
        chunks = list(client.chat.completions.create(model=model, stream=True, **arguments))
        assert answers[model] == "".join(
            choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == 1
        )
    assert answers["policy"] == answers["policy-v1"] != answers["base"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="policy-v2", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()
    headers = {"Authorization": "Bearer s3cret"}
    plain = httpx.post(f"{server.url}/generate", json={"messages": HI, "temperature": 0}, headers=headers, timeout=60)
    assert list(plain.json()) == ["text"]
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"

    def reported() -> bool:
        metrics = httpx.get(f"{server.url}/metrics", headers=headers).text
        version = re.search(r'rl_vlm_replica_adapter_version\{replica="\w+"\} 1\.0', metrics)
        return version is not None and "rl_vlm_replica_engine_generated_tokens" in metrics

    server.wait_until(reported, "the replica's report", timeout=20)  # it comes every few seconds


def test_trls_own_client_publishes_each_version_under_a_new_name(
    server: ServeProcess, client: openai.OpenAI, root: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl.experimental.async_grpo.vllm_client")
    PartialState(cpu=True)  # as its trainers make one
    with_token = requests.Session()  # which TRL's client cannot send
    with_token.headers["Authorization"] = "Bearer s3cret"
    monkeypatch.setattr(trl, "requests", with_token)
    outside = trl.VLLMClient(server.url)
    outside.wait_for_server_ready()
    assert outside.get_max_model_len() == 4096
    known = [model.id for model in client.models.list()]
    outside.unload_lora_adapter("mine")  # also where there is none
    for version in (1, 2, 3):  # of two that may be loaded
        folder = root / f"trl-policy-v{version}"
        outside_adapter(tiny_folder, version).save_pretrained(folder)
        outside.load_lora_adapter(f"trl-policy-v{version}", str(folder))
        answer = client.chat.completions.create(model=f"trl-policy-v{version}", messages=HI, max_tokens=4)
        assert (answer.system_fingerprint or "").startswith(f"trl-policy-v{version}-v")
        outside.unload_lora_adapter(f"trl-policy-v{version - 1}")
    names = [model.id for model in client.models.list()]
    assert "trl-policy-v3" in names and "trl-policy-v2" not in names
    outside.unload_lora_adapter("trl-policy-v3")
    assert [model.id for model in client.models.list()] == known


def test_a_client_that_goes_away_frees_the_replica(server: ServeProcess, client: openai.OpenAI) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.with_options(timeout=2.5).chat.completions.create, model="policy", **LONG)
        server.wait_until(lambda: server.busy(0.2) > 0.1, "work", timeout=4)
        with pytest.raises(openai.APITimeoutError):
            waiting.result()
    server.wait_until(lambda: server.busy() < 0.1, "an idle replica", timeout=10)
    with client.chat.completions.create(model="policy", stream=True, **LONG) as stream:
        next(stream)
        server.wait_until(lambda: server.busy(0.2) > 0.1, "work", timeout=4)
    server.wait_until(lambda: server.busy() < 0.1, "an idle replica", timeout=10)


def test_a_stream_whose_replica_dies_ends_with_an_error_and_other_requests_are_tried_again(
    server: ServeProcess, client: openai.OpenAI
) -> None:
    stream = client.chat.completions.create(model="policy", stream=True, **LONG)
    next(stream)
    server.kill(REPLICA)
    with pytest.raises(openai.APIError, match="replica"):
        list(stream)
    answer = client.with_options(timeout=120).chat.completions.create(model="policy", messages=HI, max_tokens=4)
    assert answer.system_fingerprint == "policy-v1"  # the new replica has the adapter from its first request on


def test_sigterm_lets_running_requests_finish(server: ServeProcess, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="policy", messages=HI, max_tokens=400, temperature=2.0, n=32, stream=True
    )
    first = next(stream)  # which may end a sample
    server.process.send_signal(signal.SIGTERM)
    reasons = [choice.finish_reason for chunk in (first, *stream) for choice in chunk.choices if choice.finish_reason]
    assert len(reasons) == 32
    assert server.wait(timeout=60) == 128 + signal.SIGTERM, server.output()
    assert server.survivors() == []
    assert "Traceback" not in server.output()
