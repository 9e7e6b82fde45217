"""Descriptions of the registered environments, for `rl-vlm envs`."""

from __future__ import annotations

import inspect
from typing import Any

from rl_vlm.envs.registry import registered, resolve
from rl_vlm.types import RLVLMError


def list_environments() -> list[dict[str, Any]]:
    """Per id: `id`, the first line of the description, `num_items` by split where no data set is needed, and `max_turns`."""
    return [_describe(env_id) for env_id in registered()]


def _describe(env_id: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": env_id, "description": "", "num_items": None, "max_turns": None}
    try:
        factory = resolve(env_id)
        signature = inspect.signature(factory)
    except (RLVLMError, ValueError, TypeError) as error:
        return {**entry, "description": f"cannot be used: {error}"}
    text = inspect.getdoc(factory) or ""
    entry["description"] = text.split("\n\n")[0].replace("\n", " ").strip()
    parameters = signature.parameters.values()
    turns = next((one.default for one in parameters if one.name == "max_turns"), None)
    entry["max_turns"] = turns if isinstance(turns, int) else None
    if any(one.default is one.empty and one.kind not in _OPTIONAL for one in parameters):
        return entry
    try:
        env = factory()
    except RLVLMError:
        return entry
    try:
        counts = {split: env.num_items(split) for split in ("train", "test")}  # type: ignore[arg-type]
    finally:
        env.close()
    turns = getattr(env, "max_turns", getattr(env, "turns", entry["max_turns"]))
    return {**entry, "num_items": counts if None not in counts.values() else None, "max_turns": turns}


_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
