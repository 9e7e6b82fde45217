"""Control-v0: steer a Gymnasium environment with words. Each turn shows pictures and takes one action word."""

from __future__ import annotations

import hashlib
import importlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import Field

from rl_vlm.control_envs.gymnasium_env import make_gymnasium, picture_of
from rl_vlm.control_envs.metaworld import task_name
from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.envs.errors import EnvError
from rl_vlm.seeding import derive_seed
from rl_vlm.types import Observation, Split, UserInputError
from rl_vlm.zoo.control.words import METAWORLD, choose_words, read_word
from rl_vlm.zoo.drawing import split_of_hash

# Packages that register their ids with gymnasium when they are imported.
_PACKAGES = {"MiniGrid-": "minigrid", "BabyAI-": "minigrid", "ALE/": "ale_py"}
MAX_HISTORY, MAX_SKIP = 16, 1000
_MAX_DRAWS = 64  # all of them belong to the other split once in 10^8
_FULL = "{task}In each of at most {turns} turns end your answer with one of these words: {words}."


class ControlWordsEnv(EpisodeEnv):
    """Play a Gymnasium environment that draws itself (`rgb_array`) and has discrete or named actions.

    env: a gymnasium id such as MiniGrid-Empty-5x5-v0 or `module:id`, or metaworld/TASK. actions: see `choose_words`.
    frame_skip: steps that an action is repeated for. history: how many of the last frames each turn shows.
    reward: "env", the sum of the environment's own, or "success", 1 when the task is done, which ends the episode. Done
    is what the environment calls `success` or `is_success`; if it says neither, an end with a reward after steps
    without one. task: what the first message says before the words, by default the environment's `mission`. prompt:
    "brief" makes the first message as short as the others. disjoint: the hash of the first picture decides the split.
    kwargs: the environment's own arguments.

    An answer that ends with no known word costs a turn, moves nothing and gets a reminder of the words. `info` holds
    `success` of the turn, `correct` (success in this turn or before), `turn`, `frames` (steps made), `well_formed` and
    `invalid_actions`.
    """

    name = "Control-v0"

    def __init__(
        self,
        env: str,
        *,
        actions: Mapping[Any, Any] | Sequence[str] | None = None,
        frame_skip: Annotated[int, Field(ge=1, le=MAX_SKIP)] = 1,
        history: Annotated[int, Field(ge=1, le=MAX_HISTORY)] = 1,
        max_turns: Annotated[int, Field(ge=1, le=10_000)] = 32,
        image_size: Annotated[int, Field(ge=16, le=2048)] | None = None,
        reward: Literal["env", "success"] = "env",
        task: str | None = None,
        prompt: Literal["full", "brief"] = "full",
        seed: int = 0,
        num_train: Count = 4096,
        num_test: Count = 512,
        disjoint: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns)
        self._inner = _make(env, kwargs)
        self.words = choose_words(self._inner, actions, METAWORLD if task_name(env) else None)
        self._skip, self._size = frame_skip, image_size
        self._rewards_success, self._task, self._brief, self._seed = reward == "success", task, prompt == "brief", seed
        self._frames: deque[Image.Image] = deque(maxlen=history)
        self._disjoint = disjoint

    def open(self, item: Item) -> tuple[Observation, Info]:
        self._count = self._invalid = 0
        self._rewarded_before = self._correct = False
        for attempt in range(_MAX_DRAWS):
            inner_seed = derive_seed(self._seed, int(item.split == "test"), item.index, attempt) % 2**31
            observation, _ = self._inner.reset(seed=inner_seed)
            self._frames.clear()
            self._draw()
            if not self._disjoint or split_of_start(self._frames[0]) == item.split:
                break
        else:
            raise EnvError(
                f"No start of the {item.split} split was found in {_MAX_DRAWS}: the environment has too few. With "
                "env.kwargs.disjoint=false it is tested on starts that it is trained on."
            )
        mission = observation.get("mission", "") if isinstance(observation, dict) else ""
        task = (self._task if self._task is not None else str(mission)).strip()
        task = f"{task[:1].upper()}{task[1:]}{'' if task.endswith(('.', '!', '?')) else '.'} " if task else ""
        words = ", ".join(self.words)
        full = _FULL.format(task=task, turns=self.max_turns, words=words)
        return self._show(question_of(self.words) if self._brief else full), {"seed": inner_seed}

    def reply(self, text: str) -> Reply:
        word = read_word(text, self.words)
        reward, terminated, truncated, success = 0.0, False, False, False
        if word is None:
            self._invalid += 1
        else:
            reward, terminated, truncated, success = self._carry_out(self.words[word])
        self._correct |= success
        if self._rewards_success:
            reward, terminated = float(success), terminated or success
        info: Info = {
            "success": success, "correct": self._correct, "turn": self.turn, "frames": self._count,
            "well_formed": word is not None, "invalid_actions": self._invalid,
        }  # fmt: skip
        if terminated or truncated:
            return Reply(reward, None, info, truncated=not terminated)
        shown = question_of(self.words) if word is not None else reminder_of(self.words)
        return Reply(reward, self._show(shown), info)

    def close(self) -> None:
        self._inner.close()

    def _carry_out(self, action: Any) -> tuple[float, bool, bool, bool]:
        """(sum of rewards, terminated, truncated, success) of an action that is repeated; draws the frames to be shown.

        Raises EnvError if `reward: success` is set and the environment does not report success.
        """
        total, terminated, truncated, success = 0.0, False, False, False
        for number in range(self._skip):
            _, reward, terminated, truncated, info = self._inner.step(action)
            total += float(reward)
            self._count += 1
            reported = info.get("success", info.get("is_success"))
            if reported is None and terminated and self._rewarded_before and self._rewards_success:
                raise EnvError(
                    "Control-v0: this environment rewards steps on the way and never reports success: leave out "
                    "reward=success."
                )
            # A pole that falls was rewarded for each step until then.
            success = success or bool(
                reported if reported is not None else terminated and reward > 0 and not self._rewarded_before
            )
            self._rewarded_before |= reward > 0
            over = terminated or truncated or (success and self._rewards_success)
            if over or number >= self._skip - (self._frames.maxlen or 1):
                self._draw()
            if over:
                break
        return total, bool(terminated), bool(truncated), success

    def _draw(self) -> None:
        self._frames.append(Image.fromarray(picture_of(self._inner.render, self._size)))

    def _show(self, text: str) -> Observation:
        return Observation.user(*self._frames, text)


def split_of_start(picture: Image.Image) -> Split:
    """The split of an episode that starts with this picture (`disjoint`)."""
    return split_of_hash(hashlib.sha256(picture.tobytes()).digest()[0])


def question_of(words: Iterable[str]) -> str:
    """The question of each turn, except for the first one with prompt "full"."""
    return f"Which action: {_choice(words)}?"


def reminder_of(words: Iterable[str]) -> str:
    return f"No action was found. End with {_choice(words)}."


def _choice(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _make(env_id: str, kwargs: dict[str, Any]) -> Any:
    if task_name(env_id):
        from rl_vlm.control_envs.registry import make_control_env

        return make_control_env(env_id, **{"hide_arm": False, "show_goal": True, **kwargs})
    package = next((module for prefix, module in _PACKAGES.items() if env_id.startswith(prefix)), None)
    try:
        if package is not None:
            importlib.import_module(package)
        return make_gymnasium(env_id, {"render_mode": "rgb_array", **kwargs})
    except (ModuleNotFoundError, UserInputError) as error:
        install = f" Run `pip install {package}`." if isinstance(error, ModuleNotFoundError) else ""
        raise UserInputError(f"Control-v0: env.kwargs.env: {error}{install}") from error
