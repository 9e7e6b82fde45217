"""Run environments written to VAGEN's interface (`GymImageEnv`), unchanged.

The class takes one dict and has the coroutines `system_prompt() -> obs`, `reset(seed) -> (obs, info)`, `step(text) ->
(obs, reward, done, info)` and `close()`; an `obs` is {"obs_str": text with placeholders, "multi_modal_input":
{placeholder: [PIL images]}}.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rl_vlm.envs.base import Count, Info, Item, Reply, Seconds
from rl_vlm.envs.errors import EnvError
from rl_vlm.envs.foreign.common import AsyncEnv, make_foreign, read_result
from rl_vlm.envs.images import as_image
from rl_vlm.types import Message, Observation, Part, Role


class VagenEnv(AsyncEnv):
    """A VisionEnv around a `GymImageEnv`.

    env: the class. num_train, num_test: how many seeds each split has. timeout_s: deadline of one call. env_config: the
    dict that the class is called with.
    """

    def __init__(
        self,
        env: Callable[[dict[str, Any]], Any],
        *,
        max_turns: Count = 16,
        num_train: Count = 4096,
        num_test: Count = 512,
        timeout_s: Seconds = 60.0,
        **env_config: Any,
    ) -> None:
        self.name = getattr(env, "__name__", "The environment")
        self._inner = make_foreign(env, env_config)
        super().__init__(timeout_s, num_train=num_train, num_test=num_test, max_turns=max_turns)

    def open(self, item: Item) -> tuple[Observation, Info]:
        number = self.number(item)
        obs, info = read_result(self._call("reset", number), "reset(seed) -> (obs, info)")
        system = self._call("system_prompt")  # after reset, as in VAGEN's own loop
        messages = [to_message(obs)]
        if system and any(system.values()):
            messages.insert(0, to_message(system, "system"))
        return Observation(tuple(messages)), {**info, "seed": number}

    def reply(self, text: str) -> Reply:
        obs, reward, done, info = read_result(self._call("step", text), "step(action) -> (obs, reward, done, info)")
        info["turn"] = self.turn
        if "success" in info:  # VAGEN's name for it; rewards for the format alone may add up to more than 1
            info.setdefault("correct", bool(info["success"]))
        return Reply(reward, None if done else Observation((to_message(obs),)), info)

    async def end(self) -> None:
        await self._inner.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        return self.run(getattr(self._inner, name)(*arguments), f"{self.name}: {name}()")


def to_message(obs: Any, role: Role = "user") -> Message:
    """The message of an observation, with each image at its placeholder. Raises EnvError if they do not fit."""
    if not isinstance(obs, dict) or not isinstance(obs.get("obs_str"), str):
        raise EnvError(f"An observation must be a dict with a text obs_str, not {str(obs)[:80]!r}.")
    pictures = {key: list(images) for key, images in (obs.get("multi_modal_input") or {}).items()}
    if not any(pictures.values()):
        return Message(role, (obs["obs_str"],))
    parts: list[Part] = []
    for piece in re.split(f"({'|'.join(map(re.escape, pictures))})", obs["obs_str"]):
        if piece not in pictures:
            parts += [piece] if piece else []
        elif not pictures[piece]:
            raise EnvError(f"The observation has more placeholders {piece} than images.")
        else:
            parts.append(as_image(pictures[piece].pop(0)))
    left = {key: len(images) for key, images in pictures.items() if images}
    if left:
        raise EnvError(f"The observation has images without a placeholder in obs_str: {left}.")
    return Message(role, tuple(parts))
