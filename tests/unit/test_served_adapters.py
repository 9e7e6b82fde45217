"""Adapters that clients load: their names, versions and number, and a registry that is restarted. Without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from core_support import adapted_policy, run_config
from loops import in_loop
from registry_support import Direct

from rl_vlm.engines.base import EngineError, VersionGoneError, check_version
from rl_vlm.http.gate import as_request_error
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving.adapters import ServedAdapters, check_servable
from rl_vlm.serving.client import GenerationFailedError
from rl_vlm.serving.deploy import ServingError
from rl_vlm.serving.registry import VersionRegistry
from rl_vlm.types import GenerationRequest, SamplingParams, UserInputError


class Willing(VersionRegistry):
    """A registry whose replicas load everything at once, or nothing."""

    loads = True

    async def report(self, *_: Any) -> Any:
        return SimpleNamespace(acked={"r": 0.1} if self.loads else {})


@pytest.fixture
def folders(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ray, "put", lambda payload: payload)
    for seed in (1, 2):
        adapted_policy(tiny_folder, seed=seed).payload(1).write(tmp_path / f"a{seed}")
    return tmp_path


def served(registry: VersionRegistry, model: Path, root: Path, **changes: Any) -> ServedAdapters:
    return ServedAdapters(Direct(registry), run_config(model, http__adapter_root=str(root), **changes), model)


async def versions(adapters: ServedAdapters) -> dict[str, tuple[int, str]]:
    policies = (await adapters.status())["policies"]
    return {name: (policy["version"], policy["folder"]) for name, policy in policies.items()}


@in_loop
async def test_a_name_that_is_loaded_again_gets_a_new_version_and_none_comes_twice(
    folders: Path, tiny_folder: Path
) -> None:
    adapters = served(Willing(), tiny_folder, folders, http__max_adapters=2)
    await adapters.load("x", "a1")
    await adapters.load("y", str(folders / "a2"))
    await adapters.load("x", "a2")
    assert await versions(adapters) == {"policy": (0, ""), "x": (3, "a2"), "y": (2, str(folders / "a2"))}
    with pytest.raises(UserInputError, match="2 adapters are loaded"):
        await adapters.load("z", "a1")
    await adapters.unload("x")
    await adapters.load("x", "a1")
    assert (await versions(adapters))["x"] == (4, "a1")
    for name in ("policy", "nobody"):
        with pytest.raises(UserInputError, match="was not loaded"):
            await adapters.unload(name)


@in_loop
@pytest.mark.parametrize(
    ("first", "second", "collides"),
    [("x", "x-v1", True), ("x", "x-v2", True), ("x-v1", "x", True), ("x-v1", "x-v1-v1", True), ("tiny-v3", "tiny", True),
     ("x", "x-v1b", False), ("x", "x-v", False), ("x", "y-v1", False), ("x.", "xy-v1", False)],
)  # fmt: skip
async def test_an_adapter_may_not_be_called_as_a_version_of_another_one(
    folders: Path, tiny_folder: Path, first: str, second: str, collides: bool
) -> None:
    adapters = served(Willing(), tiny_folder, folders)
    await adapters.load(first, "a1")
    before = await versions(adapters)
    if not collides:
        await adapters.load(second, "a2")
        return
    with pytest.raises(UserInputError, match="NAME-vN is version N of NAME"):
        await adapters.load(second, "a2")
    assert await versions(adapters) == before
    await adapters.unload(first)
    await adapters.load(second, "a2")


@in_loop
async def test_a_registry_that_was_restarted_gets_everything_again(folders: Path, tiny_folder: Path) -> None:
    adapters = served(Willing(), tiny_folder, folders)
    await adapters.publish(AdapterPayload.read(folders / "a1", 7))
    await adapters.load("x", "a2")
    before = await versions(adapters)
    assert before == {"policy": (7, ""), "x": (1, "a2")}
    adapters._registry = Direct(registry := VersionRegistry())
    await registry.join("policy")  # its tenant was faster, and has not brought the version yet
    assert await versions(adapters) == before


@in_loop
async def test_an_adapter_that_no_replica_loads_is_forgotten(folders: Path, tiny_folder: Path) -> None:
    registry = Willing()
    adapters = served(registry, tiny_folder, folders)
    registry.loads = False
    with pytest.raises(ServingError, match="made for this model"):
        await adapters.load("x", "a1")
    assert await versions(adapters) == {"policy": (0, "")}


@in_loop
async def test_names_that_left_are_told_but_not_for_ever() -> None:
    registry = VersionRegistry()
    await registry.join("stays")
    for number in range(1500):
        await registry.join(f"p{number}")
        await registry.leave(f"p{number}")
    changes = await registry.watch("r", None)
    assert changes is not None and len(changes.left) == 1000 and "p1499" in changes.left
    await registry.join("p1499")
    changes = await registry.watch("r", None)
    assert changes is not None and "p1499" not in changes.left and "p1499" in changes.newest


def test_what_vllm_and_full_weights_do_not_take_is_refused(folders: Path, tiny_folder: Path, tmp_path: Path) -> None:
    payload = AdapterPayload.read(folders / "a1", 1)
    vision = adapted_policy(tiny_folder, model__lora__target_modules="vision").payload(1)
    vllm = run_config(tiny_folder, serving__engine="vllm", http__adapter_root="/a", model__lora__rank=2)
    with pytest.raises(UserInputError, match="has rank 16, and vLLM takes 2"):
        check_servable(payload, vllm, "it")
    with pytest.raises(UserInputError, match="vision tower"):
        check_servable(vision, vllm, "it")
    check_servable(vision, run_config(tiny_folder), "it")
    wide = vllm.model_copy(
        update={
            "serving": vllm.serving.model_copy(
                update={"sharing": vllm.serving.sharing.model_copy(update={"max_lora_rank": 64})}
            )
        }
    )
    check_servable(payload, wide, "it")
    assert (wide.max_lora_rank, wide.lora_slots) == (64, 8)
    with pytest.raises(UserInputError, match="full weights"):
        check_servable(payload, run_config(tiny_folder, model__train="full"), "it")


def test_only_the_version_that_is_asked_for_answers_where_it_is_exact() -> None:
    def asked(version: int, exact: bool) -> GenerationRequest:
        return GenerationRequest("r", None, SamplingParams(1), min_version=version, policy="p", exact=exact)  # type: ignore[arg-type]

    check_version(asked(3, True), 3)
    check_version(asked(3, False), 4)
    check_version(asked(-1, False), -1)
    with pytest.raises(EngineError):
        check_version(asked(3, False), 2)
    with pytest.raises(VersionGoneError, match="Version 3 of p is gone: ask for version 4") as caught:
        check_version(asked(3, True), 4)
    wrapped = RuntimeError()
    wrapped.cause = caught.value  # type: ignore[attr-defined]  # as Ray raises it
    error = GenerationFailedError("The replica refused the request.")
    error.__cause__ = wrapped
    answer = as_request_error(error)
    assert (answer.status, answer.code, str(answer)) == (404, "model_not_found", str(caught.value))
