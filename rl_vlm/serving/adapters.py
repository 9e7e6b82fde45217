"""The adapters of a served model: its own, and the ones that clients load, each a policy with versions of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from rl_vlm.config import HTTPSection, PolicyConfig
from rl_vlm.models.lora import linear_shapes, lora_factors
from rl_vlm.models.modules import empty_model
from rl_vlm.models.weights import AdapterPayload, LoraSettings, WeightPayload, check_finite, in_language_model
from rl_vlm.serving.deploy import ServingError
from rl_vlm.serving.registry import Published
from rl_vlm.types import POLICY, UserInputError

RESERVED = re.compile(rf"{POLICY}(-v\d+)?")  # names of the model's own versions


class ServedAdapters:
    """Gives adapters to a registry, and all of them again to one that was restarted."""

    def __init__(self, registry: Any, config: PolicyConfig, model: Path, policy: Published | None = None) -> None:
        self._registry, self._config, self._model = registry, config, model
        self._held = {POLICY: policy}
        self._numbers = itertools.count(1)  # of versions, which never come again, whatever is unloaded
        self._one_load = asyncio.Lock()

    async def status(self) -> dict[str, Any]:
        """The registry's."""
        status: dict[str, Any] = await self._registry.status.remote()
        for name, one in [*self._held.items()]:
            if status["policies"].get(name, {"version": -1})["version"] < (one.version if one else 0):
                await self._registry.join.remote(name, one)
                status = await self._registry.status.remote()
        return status

    async def publish(self, payload: WeightPayload, folder: str = "") -> None:
        """Give a version to the registry. Raises ServingError unless a replica loads it; requests wait for others."""
        ref = await asyncio.to_thread(ray.put, payload)
        self._held[payload.policy] = one = Published(payload.version, payload.sha256, ref, payload.policy, folder)
        await self._registry.join.remote(one.policy, one)
        seconds = 0.8 * self._config.serving.publish_timeout_s  # a replica that fails for all of it is replaced
        if not (await self._registry.report.remote(one.version, 1, seconds, one.policy)).acked:
            del self._held[one.policy]
            await self._registry.leave.remote(one.policy)
            raise ServingError(f"No replica loaded the adapter within {seconds:g} s: was it made for this model?")

    async def load(self, name: str, path: str) -> None:
        """Publish a folder as the next version of `name`. Raises as `publish`, and UserInputError before any change."""
        limits = self._config.http
        if name == limits.model_name or RESERVED.fullmatch(name):
            raise UserInputError(f"The lora adapter {name!r} conflicts with a served model: call it by another name.")
        async with self._one_load:
            for other in {*self._held, limits.model_name or ""} - {name}:
                if any(re.fullmatch(rf"{re.escape(one)}-v\d+", two) for one, two in ((name, other), (other, name))):
                    raise UserInputError(
                        f"{name!r} and {other!r} cannot both be served, because NAME-vN is version N of NAME: call the "
                        "lora adapter by another name."
                    )
            if name not in self._held and len(self._held) > limits.max_adapters:
                raise UserInputError(f"{limits.max_adapters} adapters are loaded (http.max_adapters): unload one.")
            await self.publish(await asyncio.to_thread(self._read, name, path), path)

    async def unload(self, name: str) -> None:
        """Forget an adapter that a client has loaded. Raises UserInputError for another."""
        async with self._one_load:
            if name == POLICY or self._held.pop(name, None) is None:
                raise UserInputError(f"The lora adapter {name!r} was not loaded here.")
            await self._registry.leave.remote(name)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        return linear_shapes(empty_model(json.loads((self._model / "config.json").read_text())))

    def _read(self, name: str, path: str) -> AdapterPayload:
        payload = AdapterPayload.read(adapter_folder(path, self._config.http), next(self._numbers), name)
        check_servable(payload, self._config, f"The adapter {path}")
        lora_factors(payload, self._shapes)
        return payload


def check_servable(payload: AdapterPayload, config: PolicyConfig, what: str) -> None:
    """Raise UserInputError, about `what`, unless its values are finite and the replicas take it."""
    state, rank = payload.state(), LoraSettings.read(what, payload.config_json).r
    check_finite(state, what)
    if config.trains_full:
        raise UserInputError(f"{what} cannot be served: these replicas hold full weights.")
    if config.serving.expected_engine == "vllm" and not all(map(in_language_model, state)):
        raise UserInputError(f"{what} changes the vision tower, which vLLM ignores: set serving.engine=transformers.")
    if config.serving.expected_engine == "vllm" and rank > config.max_lora_rank:
        raise UserInputError(f"{what} has rank {rank}, and vLLM takes {config.max_lora_rank}: set model.lora.rank.")


def adapter_folder(path: str, limits: HTTPSection) -> Path:
    """The folder that a client names, absolute or from `http.adapter_root`. Raises UserInputError, which says nothing
    of other files, unless it and its files lie below that, links followed, and are ordinary and not too large."""
    top = Path(limits.adapter_root or "").resolve()
    try:
        folder = (top / path).resolve()
        for name, mib in ((AdapterPayload.TENSORS, limits.max_adapter_mib), (AdapterPayload.CONFIG, 1)):
            file = (folder / name).resolve()
            below = folder.is_relative_to(top) and file.is_relative_to(top)
            if not below or not file.is_file() or file.stat().st_size > mib * 2**20:
                raise ValueError
    except (OSError, ValueError, RuntimeError):  # also a link to itself, a NUL, a file that went away
        raise UserInputError(
            f"lora_path must be a folder below http.adapter_root with {AdapterPayload.TENSORS}, of at most "
            f"{limits.max_adapter_mib:g} MiB (http.max_adapter_mib), and {AdapterPayload.CONFIG}; .bin is not read."
        ) from None
    return folder
