"""The stand-ins of `rl_vlm.testing`, used as somebody's own tests would use them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from core_support import request, text_side

from rl_vlm.asking import Question, ask_again
from rl_vlm.config import parse_config
from rl_vlm.engines.base import EngineError
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.testing import EngineClient, LocalActor, LocalRunner, ScriptedEndpoint, ScriptedEngine
from rl_vlm.types import Message, RLVLMError, StopReason

ENVIRONMENT = """
from PIL import Image
from rl_vlm.envs.base import EpisodeEnv, Reply
from rl_vlm.types import Observation

class Higher(EpisodeEnv):
    def open(self, item):
        self.secret = item.index
        return Observation.user(Image.new("RGB", (32, 32)), "Guess.")

    def reply(self, text):
        guess = int(text)
        return Reply(1.0) if guess == self.secret else Reply(0.0, Observation.user("higher" if guess < self.secret else "lower"))
"""


@pytest.fixture
def scripted(tiny_folder: Path) -> ScriptedEngine:
    return ScriptedEngine(text_side(tiny_folder), lambda request, k: ("no", "yes, of course")[k])


def test_a_local_runner_plays_an_own_environment(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "higher.py").write_text(ENVIRONMENT)
    run = parse_config({"model": {"path": str(tiny_folder)}, "env": {"id": str(tmp_path / "higher.py")}})
    codec = text_side(tiny_folder).codec
    runner = LocalRunner(run, lambda request, k: "7" if "higher" in codec.decode(request.prompt_ids) else str(k))
    group = runner.play(7, size=2)
    for one in group.trajectories:
        assert one.reward == 1.0 and one.num_turns == 2 and len(one.images) == 1
        assert "higher" in str(one.messages)
    assert runner.client.requests[0].sampling.n == 2 and len(runner.client.requests) == 3
    with pytest.raises(RLVLMError, match="invalid literal"):
        LocalRunner(run, lambda request, k: "seven").play(0)
    runner.stop()


def test_a_scripted_engine_keeps_the_protocol_of_engines(scripted: ScriptedEngine) -> None:
    async def use() -> None:
        asked = request(scripted.text, ["Is it?"], n=2, max_new_tokens=8)
        client = EngineClient(scripted)
        answer = await client.generate(asked)
        no, yes = answer.samples
        assert scripted.text.codec.decode(no.token_ids) == "no" and no.stop_reason is StopReason.END_OF_TURN
        assert len(yes.token_ids) == 8 and yes.stop_reason is StopReason.LENGTH
        assert answer.replica_id == "here" and client.requests == scripted.requests == [asked]
        chunks = [chunk async for chunk in scripted.stream(asked)]
        assert [chunk.stop_reason for chunk in chunks if chunk.stop_reason] == [no.stop_reason, yes.stop_reason]
        assert sum(len(chunk.token_ids) for chunk in chunks) == len(no.token_ids) + len(yes.token_ids)
        newer = request(scripted.text, ["Is it?"], min_version=3)
        with pytest.raises(EngineError, match="no version 3"):
            await scripted.generate([newer])
        await scripted.load_adapter(AdapterPayload(3, b"", "{}", ""))
        await scripted.sleep()
        waiting = asyncio.create_task(scripted.generate([newer]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await scripted.wake()
        assert (await waiting)[0].policy_version == 3
        await scripted.close()
        with pytest.raises(EngineError):
            await scripted.generate([newer])

    asyncio.run(use())


def test_a_scripted_endpoint_fails_and_answers_by_its_function() -> None:
    answers = [RLVLMError("busy"), "left"]

    def answer(question: Question) -> str:
        if isinstance(found := answers.pop(0), Exception):
            raise found
        return str(found)

    async def use() -> str:
        question = Question((Message.of("user", "Where?"),), 4)
        async with ScriptedEndpoint(answer).open() as ask:
            return (await ask_again(ask, lambda n: question, attempts=2, deadline_s=10, who="model")).text

    assert asyncio.run(use()) == "left"


def test_a_local_actor_is_called_as_ray_calls_actors() -> None:
    assert LocalActor([3, 1]).index.remote(1) == 1
