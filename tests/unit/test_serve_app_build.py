"""The application for RayService: its arguments, its deployments, and that it asks for a token. Ray is not started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rl_vlm.config import PolicyConfig
from rl_vlm.runs.serve_app import HTTPIngress, build
from rl_vlm.types import UserInputError

HERE = ["serving.engine=transformers", "http.max_queue=8", "http.drain_s=3"]


def test_applications_of_one_model_do_not_share_a_registry(tiny_folder: Path) -> None:
    run_ids = {
        build({"model": str(tiny_folder), "overrides": HERE})._bound_deployment.init_args[-1] for _ in range(2)
    }  # fmt: skip
    assert len(run_ids) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "model"),
        ({"model": "tiny", "override": []}, "Unknown config key override. Did you mean overrides?"),
        ({"model": "tiny", "overrides": ["serving.num_replica=2"]}, "serving.num_replicas"),
        ({"model": "/no/such/model"}, "/no/such/model"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UserInputError, match=words):
        build(arguments)


@pytest.mark.parametrize("token", [None, "", "  "])
def test_without_a_token_nobody_is_answered(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_VLM_API_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("RL_VLM_API_TOKEN", token)
    ingress = HTTPIngress.__new__(HTTPIngress)
    with pytest.raises(UserInputError, match="RL_VLM_API_TOKEN"):
        asyncio.run(ingress.__init__(None, None, PolicyConfig(), Path("model"), "name", "id"))  # type: ignore[misc]
