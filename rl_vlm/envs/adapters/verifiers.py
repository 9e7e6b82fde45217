"""Run environments of the package verifiers, unchanged: `verifiers:NAME` of an installed one, or a `load_environment`.

Their own rollout runs in an event loop beside us. Where it asks the model, through a client of ours, it waits for the
policy's text; at its end the environment's rubric gives the reward. So turns, tools and stop conditions are its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rl_vlm.envs import registry
from rl_vlm.envs.adapters.background import BackgroundLoop
from rl_vlm.envs.adapters.splits import HeldOut, check_share
from rl_vlm.envs.adapters.verifiers_messages import from_text, to_observation
from rl_vlm.envs.base import Info, StepResult, VisionEnv
from rl_vlm.envs.errors import EnvError, as_reward
from rl_vlm.envs.images import one_line
from rl_vlm.envs.loading import is_spec
from rl_vlm.types import Observation, Split, UserInputError

_MODEL = "policy"


class VerifiersEnv(VisionEnv):
    """A VisionEnv around an environment of verifiers.

    env: the name of an installed environment, a `load_environment` function, a class or an instance.
    max_turns: replaces the environment's own limit. timeout_s: deadline of one turn, tools and rubric included.
    test_share: with one data set only, this share of it is held out for testing. Further arguments: the environment's own.

    The reward is the rubric's, at the end; `info` holds every one of its metrics by name, and `stop`, the condition that
    ended the episode.
    """

    def __init__(
        self,
        env: str | Callable[..., Any] | Any,
        *,
        max_turns: int | None = None,
        timeout_s: float = 60.0,
        test_share: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._env = _load(env, kwargs)
        if max_turns is not None:
            self._env.max_turns = max_turns
        self._timeout_s = timeout_s
        self._rows, self._held_out = _splits(self._env, check_share(test_share))
        self._loop = BackgroundLoop()
        self._episode: _Episode | None = None

    def num_items(self, split: Split) -> int | None:
        """Rows of the environment's data set."""
        total = len(self._rows[split])
        return total if self._held_out is None else self._held_out.size(split, total)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start the rollout of row `options["index"]` of `options["split"]`."""
        super().reset(seed=seed)
        self._end_episode()
        split, index = self.item(options, self.num_items((options or {}).get("split", "train")))
        rows = self._rows[split]
        number = index if self._held_out is None else self._held_out.number(split, index, len(rows))
        self._episode = _Episode(self._env, dict(rows[number]))
        observation = self._advance(None)
        if observation is None:
            raise EnvError("The rollout ended before it asked the policy anything.")
        return observation, {"index": index, "split": split, "row": number}

    def step(self, action: str) -> StepResult:
        """Hand the policy's text to the rollout; the rubric pays at its end."""
        episode = self._episode
        if episode is None:
            raise EnvError("This episode is over or never began: call reset() before step().")
        observation = self._advance(action)
        if observation is not None:
            return observation, 0.0, False, False, {"turn": episode.turn}
        self._episode = None
        state = episode.state
        stop = state.get("stop_condition")
        # With one turn, reaching the limit is how every episode ends.
        truncated = stop == "max_turns_reached" and getattr(self._env, "max_turns", 1) != 1
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        info = {**metrics, "turn": episode.turn, "stop": stop}
        if state.get("error") is not None:
            info["error"] = str(state["error"]) or type(state["error"]).__name__
        return Observation(), as_reward(state["reward"], "the rubric"), not truncated, truncated, info

    def close(self) -> None:
        """Cancel the rollout and end the loop."""
        if not self._loop.loop.is_closed():
            self._end_episode()
            self._loop.close()

    def _advance(self, text: str | None) -> Observation | None:
        assert self._episode is not None
        return self._loop.run(self._episode.advance(text), self._timeout_s, "The environment's turn")

    def _end_episode(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            self._loop.run(episode.cancel(), self._timeout_s, "The end of the rollout")


class _Episode:
    """One rollout, and the client that it takes for the model."""

    def __init__(self, env: Any, row: dict[str, Any]) -> None:
        self._env, self._row = env, row
        self.chat = self.completions = self  # `client.chat.completions.create`
        self.turn = 0
        self.state: Any = None
        self._asked: asyncio.Queue[tuple[list[Any], Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._seen: list[Any] = []
        self._rollout: asyncio.Task[Any] | None = None

    async def create(self, *, messages: list[Any], tools: Any = None, **_: Any) -> Any:
        """What the environment calls to ask the model."""
        from openai.types.chat import ChatCompletion

        self._asked.put_nowait((messages, tools))
        message = from_text(await self._answers.get(), bool(tools))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        head = {"id": f"turn-{self.turn}", "object": "chat.completion", "created": int(time.time()), "model": _MODEL}
        return ChatCompletion.model_validate({**head, "choices": [choice]})

    async def advance(self, text: str | None) -> Observation | None:
        """Give the policy's text and return what it is asked next; None at the end, when `state` holds the reward."""
        if self._rollout is None:
            self._rollout = asyncio.ensure_future(self._run())
        if text is not None:
            self.turn += 1
            self._answers.put_nowait(text)
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait((asked, self._rollout), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self.state = self._rollout.result()
            return None
        messages, tools = asked.result()
        return self._news(messages, tools)

    async def cancel(self) -> None:
        """End the rollout; its clean-up handlers run."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.wait((self._rollout,))

    async def _run(self) -> Any:
        import verifiers

        state = await self._env.rollout(self._row, self, _MODEL, {})
        error = state.get("error")
        # A tool that the policy misused is scored as verifiers does; any other error is none of the policy's.
        if error is not None and not isinstance(error, verifiers.ToolError):
            raise EnvError(f"The rollout failed ({type(error).__name__}: {one_line(error)}).")
        await self._env.rubric.score_rollout(state)
        return state

    def _news(self, messages: list[Any], tools: Any) -> Observation:
        """The messages behind those that the policy knows and its answer to them."""
        known = len(self._seen) + 1 if self._seen else 0
        if messages[: len(self._seen)] != self._seen or len(messages) <= known:
            raise EnvError("The environment rewrites or repeats its conversation, which must only grow.")
        self._seen = list(messages)
        return to_observation(messages[known:], tools if known == 0 else None)


def _load(env: Any, kwargs: dict[str, Any]) -> Any:
    """The environment; UserInputError where the package or the environment is missing, or cannot be played here."""
    try:
        import verifiers
        import verifiers.envs.environment as base
    except ImportError as error:
        raise UserInputError(f"verifiers is not installed ({error}): run `pip install 'rl-vlm[verifiers]'`.") from error
    # Its environments take over SIGINT and SIGTERM. Only a main thread can, and runs end by handlers of their own.
    base.signal = SimpleNamespace(signal=lambda *_: None, SIGINT=0, SIGTERM=0, default_int_handler=None)  # type: ignore[attr-defined]
    if isinstance(env, str) and is_spec(env):
        env = registry.find(env)
    try:
        if isinstance(env, str):
            env = verifiers.load_environment(env, **kwargs)
        elif callable(env):
            env = env(**kwargs)
    except Exception as error:  # whatever the user's code raises, or the import of a package that is not there
        raise UserInputError(
            f"The environment cannot be loaded ({type(error).__name__}: {one_line(error)}): install it, or correct env.kwargs."
        ) from error
    if not isinstance(env, verifiers.Environment):
        raise UserInputError(f"It made a {type(env).__name__}, which is no environment of verifiers.")
    if env.message_type != "chat":
        raise UserInputError(
            "The environment asks for completions of a text: only those with chat messages can be played."
        )
    for rubric in getattr(env.rubric, "rubrics", [env.rubric]):
        if rubric._get_group_reward_funcs():
            names = ", ".join(rubric._get_group_reward_func_names())
            raise UserInputError(
                f"The rubric compares the answers of a group ({names}): each answer needs its own reward here."
            )
    return env


def _splits(env: Any, share: float) -> tuple[dict[Split, Any], HeldOut | None]:
    """The rows of both splits, and how one data set is divided where there is only one."""
    train, test = env.build_dataset(), env.build_eval_dataset()
    if train is not None and test is not None and train is not test:
        return {"train": train, "test": test}, None
    rows = train if train is not None else test
    if rows is None:
        raise UserInputError("The environment has neither a dataset nor an eval_dataset.")
    return {"train": rows, "test": rows}, HeldOut(share)
