"""The application that RayService deploys, run by `serve run` from the rendered manifest's own configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from core_support import adapted_policy
from ports import free_ports
from runs import REGISTRY, ROOT, ServeRun

pytestmark = pytest.mark.acceptance

HI: list[Any] = [{"role": "user", "content": "How many shapes are there?"}]
HERE = ("serving.engine=transformers", "serving.num_replicas=1", "serving.cpus_per_replica=0.1", "http.model_name=base")


@pytest.fixture(scope="module")
def config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifest's Serve configuration with the tiny model, an adapter that changes it a lot, and a free port."""
    folder = tmp_path_factory.mktemp("served")
    adapter = adapted_policy(tiny_folder).payload(1).write(folder / "adapter")
    manifest = yaml.safe_load((ROOT / "cluster/kuberay/components/service/rayservice.yaml").read_text())
    settings = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = settings["applications"]
    application["args"] = {"model": str(tiny_folder), "overrides": [*HERE], "adapter": str(adapter)}
    settings["http_options"] = {"host": "127.0.0.1", "port": free_ports(1)[0]}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[tuple[ServeRun, str]]:
    options = yaml.safe_load(config.read_text())["http_options"]
    url = f"http://{options['host']}:{options['port']}"
    with ServeRun(config, RL_VLM_API_TOKEN="s3cret") as process:
        process.wait_until_healthy(url)
        yield process, url


def test_openais_client_gets_answers_of_the_adapter_and_of_the_base(server: tuple[ServeRun, str]) -> None:
    client = openai.OpenAI(base_url=f"{server[1]}/v1", api_key="s3cret", max_retries=0, timeout=120)
    assert [model.id for model in client.models.list()] == ["policy", "policy-v1", "base"]
    answers = {}
    for model, fingerprint in (("policy", "policy-v1"), ("base", "base")):
        whole = client.chat.completions.create(model=model, messages=HI, temperature=0, max_tokens=12)
        assert whole.system_fingerprint == fingerprint
        chunks = client.chat.completions.create(model=model, messages=HI, temperature=0, max_tokens=12, stream=True)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        answers[model] = whole.choices[0].message.content
        assert text == answers[model]
    assert answers["policy"] != answers["base"]


def test_a_registry_that_dies_comes_back_with_its_adapter(server: tuple[ServeRun, str]) -> None:
    process, url = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret", max_retries=0, timeout=120)
    first = process.kill(REGISTRY)
    process.wait_until(
        lambda: any(actor.pid != first for actor in process.actors(REGISTRY)), "another registry", timeout=60
    )
    answer = client.chat.completions.create(model="policy", messages=HI, max_tokens=4)
    assert answer.system_fingerprint == "policy-v1"
    assert "policy-v1" in [model.id for model in client.models.list()]


def test_without_a_token_the_application_does_not_start(config: Path) -> None:
    with ServeRun(config, RL_VLM_API_TOKEN="") as process:
        process.wait_until(lambda: "set RL_VLM_API_TOKEN" in process.output(), "the refusal", timeout=240)
