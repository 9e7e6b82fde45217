"""Run environments of the package verifiers, unchanged: `verifiers:NAME` of an installed one, or a `load_environment`.

Their own rollout runs in an event loop, in a thread of ours. Where it asks the model, through a client of ours, it
waits for the policy's text; at its end the environment's rubric gives the reward. So turns, tools and stop
conditions are its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from rl_vlm.envs import registry
from rl_vlm.envs.base import Count, Info, Item, Reply, Seconds
from rl_vlm.envs.errors import EnvError, as_reward
from rl_vlm.envs.foreign.common import AsyncEnv, Share, held_out, import_extra, make_foreign, to_message, with_class
from rl_vlm.envs.loading import is_spec
from rl_vlm.envs.tool_forms import CLOSE, OPEN, ToolCallError
from rl_vlm.envs.tools import parse_tool_call
from rl_vlm.safe_text import without_thoughts
from rl_vlm.types import Message, Observation, Split, UserInputError

MAX_CALLS = 16  # of one turn; further ones are left out

# The form that Qwen's and Hermes' chat templates give to tools.
TOOLS = """# Tools

You may call one or more functions. Their signatures, within <tools></tools>:
<tools>
{tools}
</tools>

For each call, return a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


class VerifiersEnv(AsyncEnv):
    """A VisionEnv around an environment of verifiers.

    env: the name of an installed environment, a `load_environment` function, a class or an instance. max_turns:
    replaces the environment's own limit. timeout_s: deadline of one turn, tools and rubric included. test_share: how
    much is held out if there is one data set only. kwargs: the environment's own arguments.

    The reward is the rubric's, at the end; `info` holds every one of its metrics by name, and `stop`, the condition
    that ended the episode.
    """

    def __init__(
        self,
        env: str | Callable[..., Any] | Any,
        *,
        max_turns: Count | None = None,
        timeout_s: Seconds = 60.0,
        test_share: Share = 0.1,
        **kwargs: Any,
    ) -> None:
        self._env = _load(env, kwargs)
        given = [rows for rows in (self._env.build_dataset(), self._env.build_eval_dataset()) if rows is not None]
        self._rows_of: dict[Split, Any] = {"train": given[0], "test": given[-1]}
        self._one_set = given[0] is given[-1]
        num_train, num_test = held_out(len(given[0]), test_share) if self._one_set else map(len, given)
        super().__init__(timeout_s, num_train=num_train, num_test=num_test)
        if max_turns is not None:
            self._env.max_turns = max_turns
        self._episode: _Rollout | None = None

    def open(self, item: Item) -> tuple[Observation, Info]:
        number = self.number(item) if self._one_set else item.index
        observation = self.run(self._begin(dict(self._rows_of[item.split][number])), "The first turn")
        if not isinstance(observation, Observation):
            raise EnvError("The rollout ended before it asked the policy anything.")
        return observation, {"row": number}

    def reply(self, text: str) -> Reply:
        assert self._episode is not None  # the episode is open
        after = self.run(self._episode.advance(text), "The environment's turn")
        if isinstance(after, Observation):
            return Reply(0.0, after, {"turn": self.turn})
        stop, error = after.get("stop_condition"), after.get("error")
        # With one turn, reaching the limit is how every episode ends.
        truncated = stop == "max_turns_reached" and getattr(self._env, "max_turns", 1) != 1
        metrics = {name: float(value) for name, value in (after.get("metrics") or {}).items()}
        info = {**metrics, "turn": self.turn, "stop": stop}
        if error is not None:
            info["error"] = str(error) or type(error).__name__
        return Reply(as_reward(after["reward"], "the rubric"), None, info, truncated)

    async def end(self) -> None:
        if self._episode is not None:
            self._episode.rollout.cancel()
            await asyncio.wait((self._episode.rollout,))  # its clean-up handlers run

    async def _begin(self, row: dict[str, Any]) -> Observation | Any:
        await self.end()
        self._episode = _Rollout(self._env, row)
        return await self._episode.advance()


class _Rollout:
    """One rollout, and the client that it takes for the model."""

    def __init__(self, env: Any, row: dict[str, Any]) -> None:
        self.chat = self.completions = self  # `client.chat.completions.create`
        # (messages, tools) of each question to the model; None when the rollout has ended.
        self._asked: asyncio.Queue[tuple[list[Any], Any] | None] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._seen: list[Any] = []
        self.rollout = asyncio.ensure_future(_played(env, row, self))
        self.rollout.add_done_callback(lambda _: self._asked.put_nowait(None))

    async def create(self, *, messages: list[Any], tools: Any = None, **_: Any) -> Any:
        """What the environment calls to ask the model."""
        from openai.types.chat import ChatCompletion

        self._asked.put_nowait((messages, tools))
        message = from_text(await self._answers.get(), bool(tools))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        head = {"id": "turn", "object": "chat.completion", "created": 0, "model": "policy"}
        return ChatCompletion.model_validate({**head, "choices": [choice]})

    async def advance(self, text: str | None = None) -> Observation | Any:
        """Give the policy's text and return what it is asked next; at the end the rollout's state, with the reward."""
        if text is not None:
            self._answers.put_nowait(text)
        asked = await self._asked.get()
        if asked is None:
            return await self.rollout
        messages, tools = asked
        known = len(self._seen) + 1 if self._seen else 0  # the messages so far, and the policy's answer to them
        if messages[: len(self._seen)] != self._seen or len(messages) <= known:
            raise EnvError("The environment rewrites or repeats its conversation, which must only grow.")
        self._seen = list(messages)
        shown = [to_message(_with_calls(message)) for message in messages[known:]]
        if tools and not known:  # the system message describes them
            system = shown.pop(0).parts if shown[0].role == "system" else ()
            text = TOOLS.format(tools="\n".join(map(json.dumps, tools)))
            shown.insert(0, Message("system", (*system, "\n\n" * bool(system) + text)))
        return Observation(tuple(shown))


async def _played(env: Any, row: dict[str, Any], client: _Rollout) -> Any:
    """The state of a whole rollout, with its reward."""
    import verifiers

    state = await env.rollout(row, client, "policy", {})
    error = state.get("error")
    # A tool that the policy misused is scored as verifiers does; any other error is none of the policy's.
    if error is not None and not isinstance(error, verifiers.ToolError):
        raise EnvError(f"The rollout failed ({with_class(error)}).")
    await env.rubric.score_rollout(state)
    return state


def _load(env: Any, kwargs: dict[str, Any]) -> Any:
    """The environment; UserInputError if the package or the environment is missing, or cannot be played here."""
    verifiers = import_extra("verifiers", "verifiers")
    # Its environments take over SIGINT and SIGTERM. Only a main thread can, and runs end by handlers of their own.
    no_signals = SimpleNamespace(signal=lambda *_: None, SIGINT=0, SIGTERM=0, default_int_handler=None)
    verifiers.envs.environment.signal = no_signals
    if isinstance(env, str):
        env = registry.find(env) if is_spec(env) else partial(verifiers.load_environment, env)
    if callable(env):
        env = make_foreign(env, **kwargs)
    if not isinstance(env, verifiers.Environment):
        raise UserInputError(f"It made a {type(env).__name__}, which is no environment of verifiers.")
    if env.message_type != "chat":
        raise UserInputError("The environment completes texts: only one with chat messages can be played.")
    for rubric in getattr(env.rubric, "rubrics", [env.rubric]):
        if rubric._get_group_reward_funcs():
            names = ", ".join(rubric._get_group_reward_func_names())
            raise UserInputError(
                f"The rubric compares the answers of a group ({names}): each answer needs its own reward here."
            )
    return env


def _with_calls(message: Any) -> Any:
    """OpenAI's message with its tool calls as text."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not calls:
        return message
    blocks = [message.get("content")]
    for function in (call["function"] for call in calls):
        name, arguments = json.dumps(function["name"]), function["arguments"]
        blocks.append(f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}')
    return {"role": "assistant", "content": "\n".join(filter(None, blocks))}


def from_text(text: str, with_tools: bool) -> dict[str, Any]:
    """OpenAI's assistant message for what the policy wrote; with tools, its calls are taken out of the text.

    A malformed call becomes one whose arguments are no JSON, so that the environment answers it in its own way.
    """
    _, mark, called = without_thoughts(text).partition(OPEN) if with_tools else ("", "", "")
    if not mark:  # verifiers takes an answer without any text for a failure of the model
        return {"role": "assistant", "content": text or " "}
    calls = []
    for number, block in enumerate(called.split(OPEN)[:MAX_CALLS]):
        function = {"name": "", "arguments": f"malformed: {block}"}
        try:
            if call := parse_tool_call(OPEN + block):
                function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        except ToolCallError as error:
            function["arguments"] = f"malformed: {error}"
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
    content = text.rstrip().removesuffix(mark + called).strip()  # with its thoughts
    return {"role": "assistant", "content": content or None, "tool_calls": calls}
