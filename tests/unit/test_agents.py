"""Agents of the user's own: what they are given, what is recorded of their calls, and how they fail. No Ray, a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import adapted_policy, run_config, text_side

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.registry import make
from rl_vlm.http import agents
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.testing import EngineClient, ScriptedEngine
from rl_vlm.types import GenerationRequest, Trajectory, UserInputError

HEAD = """
import base64, io, threading
import httpx
from PIL import Image

def url(task, side=32):
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), tuple(task.random().integers(0, 255, 3).tolist())).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

def user(text, *pictures):
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
"""
LOOP = """
async def agent(client, task, turns=3):
    messages = [user("start", url(task))]
    for turn in range(turns):
        answer = await client.chat.completions.create(model=task.model, messages=messages, temperature=0.1, max_tokens=6)
        messages += [answer.choices[0].message, user(f"go on {turn}", url(task, 64))]
    return turns / 2
"""


@pytest.fixture
def sample(tmp_path: Path, tiny_folder: Path) -> Iterator[Callable[..., RolloutResult]]:
    """Samples groups of an agent's source with an engine."""
    workers: list[RolloutWorker] = []

    def sample(
        source: str, engine: Any, groups: int = 1, size: int = 2, view: Any = "true", **dotted: Any
    ) -> RolloutResult:
        (tmp_path / "my_agent.py").write_text(HEAD + source)
        settings = {"env__id": str(tmp_path / "my_agent.py"), "rollout__max_new_tokens_per_turn": 6,
                    "rollout__group_retries": 0, "serving__max_context": 1024, **dotted}  # fmt: skip
        run = run_config(tiny_folder, **settings)
        workers.append(RolloutWorker(run, "run", tiny_folder, client=EngineClient(engine)))
        tasks = [
            RolloutTask(
                f"g{k}",
                k,
                "train",
                seed=k,
                sampling_seed=k,
                size=size,
                temperature=1.0,
                min_version=0,
                record=True,
                view=view,
            )
            for k in range(groups)
        ]
        return asyncio.run(workers[-1].run(tasks))

    yield sample
    for worker in workers:
        worker.close_envs()


@pytest.fixture
def scripted(tiny_folder: Path) -> ScriptedEngine:
    return ScriptedEngine(text_side(tiny_folder), lambda request, k: f"r{k}")


def trajectories(result: RolloutResult) -> list[Trajectory]:
    assert not result.lost, result.lost
    return [one for group in result.groups for one in group.trajectories]


def test_calls_that_go_on_are_one_sequence_of_the_tokens_that_were_sampled(
    sample: Callable[..., RolloutResult], tiny_folder: Path
) -> None:
    """Of a real engine, whose random tokens are seldom those of their text; the learner finds its log-probabilities."""
    form = {"rollout__format": {"regex": "[a-z]{2,5}"}}
    engine = TransformersEngine(tiny_folder, max_context=1024)
    try:
        found = trajectories(sample(LOOP, engine, groups=2, **form))
    finally:
        asyncio.run(engine.close())
    assert len(found) == 4 and {one.reward for one in found} == {1.5}
    updater = PolicyUpdater(adapted_policy(tiny_folder, scale=0.0), run_config(tiny_folder, **form))
    for one, logprobs in zip(found, updater.recompute(found), strict=True):
        assert len(one.turns) == 3 and one.info["calls"] == 3 and not one.segments
        np.testing.assert_allclose(logprobs, one.logprobs[one.loss_mask], atol=1e-4)


def test_the_task_decides_how_calls_are_sampled(sample: Callable[..., RolloutResult], scripted: ScriptedEngine) -> None:
    (first, second) = trajectories(sample(LOOP, scripted))
    assert {request.sampling.temperature for request in scripted.requests} == {1.0}
    assert len({request.sampling.seeds for request in scripted.requests}) == 6
    assert [len(one.images) for one in (first, second)] == [3, 3] and not first.segments
    assert [message.role for message in first.messages] == ["user", "assistant"] * 3
    assert [turn.reward for turn in first.turns] == [0, 0, 1.5]


def test_pictures_are_blank_or_another_items_where_sight_is_measured(
    sample: Callable[..., RolloutResult], scripted: ScriptedEngine
) -> None:
    shown = {
        view: [one.images for one in trajectories(sample(LOOP, scripted, groups=2, size=1, view=view))]
        for view in ("true", "blank", "swapped")
    }
    for view in ("blank", "swapped"):
        for own, others in zip(shown["true"], shown[view], strict=True):
            assert [(a.width, a.height) for a in own] == [(b.width, b.height) for b in others]
            assert not {a.sha256 for a in own} & {b.sha256 for b in others}


def test_other_calls_begin_segments(sample: Callable[..., RolloutResult], scripted: ScriptedEngine) -> None:
    """Sub-agents in parallel, several samples of a call, a prompt that forgets; a form is not trained."""
    source = """
import asyncio
async def agent(client, task):
    ask = client.chat.completions.create
    await asyncio.gather(*(ask(model="policy", messages=[user(f"part {k}", url(task))]) for k in range(3)))
    both = await ask(model="policy", messages=[user("two")], n=2)
    await ask(model="policy", messages=[user("two"), both.choices[1].message, user("on")])
    await ask(model="policy", messages=[user("form")], extra_body={"structured_outputs": {"choice": ["r0"]}})
    stream = await ask(model="policy", messages=[user("stream")], stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    return float(text == "r0")
"""
    (one,) = trajectories(sample(source, scripted, size=1, rollout__max_turns=9))
    assert one.reward == 1 and (one.info["calls"], one.info["untrained_calls"]) == (8, 1)
    assert len(one.segments) == 6 and len(one.turns) == 7
    assert sorted(len(segment.images) for segment in one.segments) == [0, 0, 0, 1, 1, 1]
    assert sorted(len(part.turns) for part in one.parts) == [1, 1, 1, 1, 1, 2]


def test_agents_without_asyncio_and_clients_of_other_kinds(
    sample: Callable[..., RolloutResult], scripted: ScriptedEngine
) -> None:
    source = """
from rl_vlm.envs.base import Reply
def agent(client, task):
    body = {"model": task.model, "messages": [user("hi")]}
    headers = {"Authorization": f"Bearer {task.api_key}"}
    raw = httpx.post(f"{task.base_url}/chat/completions", json=body, headers=headers).json()
    answer = client.chat.completions.create(model=task.model, messages=[user("hi")])
    said = raw["choices"][0]["message"]["content"] + answer.choices[0].message.content
    return Reply(2.0, info={"said": said, "correct": True})
"""
    found = trajectories(sample(source, scripted))
    assert {one.info["said"] for one in found} == {"r0r0"} and all(one.correct and one.reward == 2 for one in found)


def test_a_class_computes_the_reward_apart_from_the_loop(
    sample: Callable[..., RolloutResult], scripted: ScriptedEngine
) -> None:
    """With an object for each episode."""
    source = """
from rl_vlm.envs.base import Reply
class Mine:
    def __init__(self, worth=1.0):
        self.worth, self.said = worth, []

    async def run(self, client, task):
        answer = await client.chat.completions.create(model=task.model, messages=[user("hi")])
        self.said.append(answer.choices[0].message.content)
        return len(self.said)

    def reward(self, task, result):
        return Reply(self.worth * result, info={"said": self.said[0], "index": task.index})
"""
    found = trajectories(sample(source, scripted, groups=2, env__kwargs={"worth": 3}))
    assert {(one.reward, one.info["said"]) for one in found} == {(3.0, "r0")}
    assert [one.info["index"] for one in found] == [0, 0, 1, 1]


def test_a_program_finds_the_policy_in_its_environment(
    sample: Callable[..., RolloutResult], scripted: ScriptedEngine
) -> None:
    source = """
import os, subprocess, sys
ASK = "import openai; openai.OpenAI().chat.completions.create(model='policy', messages=[{'role': 'user', 'content': 'hi'}])"
def agent(client, task):
    return float(subprocess.run([sys.executable, "-c", ASK], env={**os.environ, **task.environ}).returncode == 0)
"""
    assert [(one.reward, len(one.turns)) for one in trajectories(sample(source, scripted, size=1))] == [(1.0, 1)]


def test_a_server_that_does_not_start_is_told(
    sample: Callable[..., RolloutResult], scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents.HTTPServer, "run", lambda *_: None)
    monkeypatch.setattr(agents, "_START_S", 0.1)
    assert "did not start within 0.1 s" in sample(LOOP, scripted).lost["g0"]


@pytest.mark.parametrize(
    "body, reason, said",
    [
        ("raise KeyError('row')", "env", "KeyError"),
        ("return 'good'", "env", "reward"),
        ("return 1.0", "agent_without_calls", "never called"),
        ("import time; time.sleep(30)", "env_timeout", "did not answer"),
    ],
)
def test_an_agent_that_fails_fails_its_group(
    sample: Callable[..., RolloutResult], scripted: ScriptedEngine, body: str, reason: str, said: str
) -> None:
    result = sample(
        f"def agent(client, task):\n    {body}\n",
        scripted,
        env__step_timeout_s=2.0 if reason == "env_timeout" else 60.0,
    )
    assert result.dropped == {reason: 1} and said in result.lost["g0"]


def test_arguments_that_the_agent_does_not_take_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def agent(client, task, turns=2):\n    return 1.0\n")
    assert make(str(tmp_path / "a.py"), turns=3, num_train=5, num_test=2).num_items("test") == 2
    loop = "class Mine:\n    def __init__(self, turns=2): ...\n    def run(self, client, task): ...\n    def reward(self, task, result): ..."
    (tmp_path / "b.py").write_text(loop)
    assert make(str(tmp_path / "b.py"), turns=3, num_test=2).num_items("test") == 2
    for wrong in ({"task": "count"}, {"turn": 1}):
        for name in "ab":
            with pytest.raises(UserInputError, match="env.kwargs"):
                make(str(tmp_path / f"{name}.py"), **wrong)


def test_budgets_and_tokens_bound_an_episode(sample: Callable[..., RolloutResult], scripted: ScriptedEngine) -> None:
    """Calls beyond the turns are refused in a sentence; another token, or one whose episode has ended, opens nothing."""
    source = """
import openai
KEYS = []
async def agent(client, task):
    KEYS.append((task.base_url, task.api_key))
    wrong = openai.AsyncOpenAI(base_url=task.base_url, api_key="none", max_retries=0)
    for one, kind in ((wrong, openai.AuthenticationError), (client, openai.BadRequestError)):
        try:
            for _ in range(3):
                await one.chat.completions.create(model="policy", messages=[user("hi")])
        except kind as error:
            assert "opens no episode" in str(error) or "max_turns (2)" in str(error)
        else:
            return 0.0
    return 1.0
"""
    found = trajectories(sample(source, scripted, rollout__max_turns=2))
    assert [(one.reward, len(one.turns)) for one in found] == [(1.0, 2)] * 2


def test_the_pages_agent(sample: Callable[..., RolloutResult], tiny_folder: Path) -> None:
    source = (Path(__file__).parents[2] / "docs/agents.md").read_text().split("```python\n")[1].split("```")[0]
    text = text_side(tiny_folder)

    def said(request: GenerationRequest, k: int) -> str:
        return "lime" if "Try again" in text.codec.text_of(request.prompt_ids) else "red"

    found = trajectories(sample(source, ScriptedEngine(text, said), groups=12, size=2))
    assert {one.reward for one in found} == {0.0, 0.5, 1.0} and len(source.splitlines()) < 40


# The same agent in several frameworks: it may look at a lamp, and is asked twice in one conversation.
LOOK = """
def look(where: str) -> str:
    '''Look at the lamp.

    Args:
        where: Where to look.
    '''
    return f"a {where} lamp"
"""
FRAMEWORKS = {
    "openai_agents": """
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)

async def agent(client, task):
    model = OpenAIChatCompletionsModel(task.model, client)
    lamp = Agent("lamp", instructions="Look.", tools=[function_tool(look)], model=model)
    first = await Runner.run(lamp, "Which lamp is it?")
    second = await Runner.run(lamp, [*first.to_input_list(), {"role": "user", "content": "Again?"}])
    return float(first.final_output == second.final_output == "red")
""",
    "pydantic_ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

async def agent(client, task):
    model = OpenAIChatModel(task.model, provider=OpenAIProvider(openai_client=client))
    lamp = Agent(model, system_prompt="Look.", tools=[look])
    first = await lamp.run("Which lamp is it?")
    second = await lamp.run("Again?", message_history=first.all_messages())
    return float(first.output == second.output == "red")
""",
    "langchain": """
import httpx
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

async def agent(client, task):
    tools = [tool(look)]
    http = httpx.AsyncClient()  # LangChain would share one with the other episodes, each of which has its own event loop
    chat = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key, http_async_client=http)
    model = chat.bind_tools(tools)
    messages = [SystemMessage("Look.")]
    for asked in ("Which lamp is it?", "Again?"):
        messages.append(HumanMessage(asked))
        messages.append(await model.ainvoke(messages))
        while messages[-1].tool_calls:
            messages += [await tools[0].ainvoke(call) for call in messages[-1].tool_calls]
            messages.append(await model.ainvoke(messages))
    return float(messages[-1].content == "red")
""",
    "smolagents": """
from smolagents import OpenAIModel, ToolCallingAgent, tool

def agent(client, task):
    model = OpenAIModel(task.model, api_base=task.base_url, api_key=task.api_key, tool_choice="auto")
    lamp = ToolCallingAgent([tool(look)], model, instructions="Look.", max_steps=4, verbosity_level=0)
    first = lamp.run("Which lamp is it?")
    return float(first == lamp.run("Again?", reset=False) == "red")
""",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_with_a_tool(framework: str, sample: Callable[..., RolloutResult], tiny_folder: Path) -> None:
    """What is sent back as it was sampled goes on; smolagents sends calls as another text, and each begins a segment."""
    text, is_smol = text_side(tiny_folder), framework == "smolagents"

    def answer(request: GenerationRequest, k: int) -> str:
        looked = "a red lamp" in text.codec.text_of(request.prompt_ids)
        if looked and not is_smol:
            return "red"
        name, arguments = ("final_answer", {"answer": "red"}) if looked else ("look", {"where": "red"})
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    engine, most = ScriptedEngine(text, answer), {"serving__max_context": 8192}  # smolagents' own instructions are long
    found = trajectories(sample(LOOK + FRAMEWORKS[framework], engine, rollout__max_new_tokens_per_turn=64, **most))
    assert [(one.reward, len(one.turns), len(one.segments)) for one in found] == [(1.0, 3, 3 * is_smol)] * 2
    assert {one.info["untrained_calls"] for one in found} == {0}


def test_two_episodes_never_mix(sample: Callable[..., RolloutResult], tiny_folder: Path) -> None:
    """Each agent repeats what the other one may say; every reply names the episode whose call it was."""
    source = """
import asyncio
async def agent(client, task):
    mine = None
    for turn in range(4):
        answer = await client.chat.completions.create(model="policy", messages=[user(f"item {task.index}")])
        await asyncio.sleep(0.01)
        mine = answer.choices[0].message.content
        if mine != f"item {task.index}":
            return 0.0
    return 1.0
"""
    text = text_side(tiny_folder)

    def answer(request: GenerationRequest, k: int) -> str:
        return "item " + text.codec.text_of(request.prompt_ids).split("item ")[1].split("<")[0]

    found = trajectories(sample(source, ScriptedEngine(text, answer), groups=4, size=3))
    assert len(found) == 12 and {one.reward for one in found} == {1.0}
    for one in found:
        item = one.trajectory_id.split(":")[0].removeprefix("g")
        assert text.codec.text_of(one.token_ids).count(f"item {item}") == 8
