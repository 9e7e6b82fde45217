"""Evaluation of an OpenAI-compatible server: a small one over real HTTP that answers well, late, badly or not at all."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ports import local_server

from rl_vlm.asking import Answer, Question, without_tool_role
from rl_vlm.config import EndpointSection, ModelSection, PolicyConfig, parse_config
from rl_vlm.evaluation.heldout import EvaluationOptions, evaluation_tasks
from rl_vlm.evaluation.players import EndpointPlayer, EpisodesLostError
from rl_vlm.models.loading import load_text_side
from rl_vlm.runs.evaluate import evaluate_policy_run
from rl_vlm.types import Message, UserInputError
from rl_vlm.zoo.shapes.environment import ShapesEnv

ITEMS = 6
KWARGS: dict[str, Any] = {"task": "count", "turns": 2}

Reply = Callable[[dict[str, Any]], tuple[int, Any]]


class Server:
    """Chat completions by `reply`, from the request's JSON to a status and content; keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.reply: Reply = lambda body: (200, said("?"))
        self.url = ""

    def answer(self, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        self.requests.append(json.loads(body))
        self.tokens.append(headers["Authorization"])
        return self.reply(self.requests[-1])


def said(text: str, finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": 5}}


def pictures(body: dict[str, Any]) -> list[str]:
    """SHA-256 of the PNG files of a request."""
    found = []
    for message in body["messages"]:
        for part in message["content"]:
            if part["type"] == "image_url":
                head, _, data = part["image_url"]["url"].partition(",")
                assert head == "data:image/png;base64"
                found.append(hashlib.sha256(base64.b64decode(data)).hexdigest())
    return found


def answers() -> dict[str, Any]:
    """The right answer by picture."""
    env = ShapesEnv(**KWARGS)
    known = {}
    for index in range(ITEMS):
        observation, _ = env.reset(seed=0, options={"index": index, "split": "test"})
        (image,) = observation.messages[0].images
        known[image.sha256] = env.step("?")[4]["answer"]
    return known


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with local_server(server.answer) as url:
        server.url = f"{url}/v1"
        yield server


def run_of(**rollout: Any) -> PolicyConfig:
    return parse_config(
        {
            "env": {"id": "Shapes-v0", "kwargs": KWARGS},
            "rollout": {"max_new_tokens_per_turn": 16, "max_consecutive_failures": 3, **rollout},
            "evaluation": {"num_items": ITEMS, "at_once": 2},
        }
    )


def measured(server: Server, run: PolicyConfig, out: Path | None = None, **options: Any) -> dict[str, Any]:
    names = [name for name in options if name in EndpointSection.model_fields]
    endpoint = EndpointSection(url=server.url, logprobs=False, **{name: options.pop(name) for name in names})
    return evaluate_policy_run(run, out=out, options=EvaluationOptions(endpoint=endpoint, **options))


def test_a_server_plays_several_turns_and_is_asked_again_when_it_is_busy(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = answers()
    busy = iter([True])

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if next(busy, False):
            return 503, {"error": "busy"}
        turn = [message["role"] for message in body["messages"]].count("assistant")
        return 200, said("nonsense" if turn == 0 else f"<answer>{known[pictures(body)[0]]}</answer>")

    server.reply = reply
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    out = tmp_path / "results.json"
    results = measured(server, run_of(), out, model="other", token_env="MY_TOKEN")
    assert results["accuracy/default"] == 1.0 and results["turns/default"] == 2 and results["lost"] == 0
    assert results["model"] == "other" and len(server.requests) == 2 * ITEMS + 1
    kept = [json.loads(line) for line in (tmp_path / "results.items.jsonl").read_text().splitlines()[1:]]
    assert {line["index"]: line["answers"] for line in kept} == {
        index: ["nonsense", f"<answer>{right}</answer>"] for index, right in enumerate(known.values())
    }
    assert set(server.tokens) == {"Bearer s3cret"} and "s3cret" not in (tmp_path / "results.items.jsonl").read_text()
    later = [body for body in server.requests if len(body["messages"]) > 1]
    assert [[m["role"] for m in body["messages"]] for body in later] == [["user", "assistant", "user"]] * ITEMS
    assert {body["temperature"] for body in later} == {0} and {body["max_tokens"] for body in later} == {16}
    with pytest.raises(UserInputError, match='"other"'):
        measured(server, run_of(), out, resume=True)


def test_a_tools_reply_is_sent_as_the_users_message_that_the_template_makes_of_it(server: Server) -> None:
    """OpenAI's tool messages need the id of a call and hold no images."""
    server.reply = lambda body: (
        200,
        said('<tool_call>\n{"name": "calc_score", "arguments": {"answer": "0"}}\n</tool_call>'),
    )
    run = run_of()
    run = run.model_copy(update={"env": run.env.model_copy(update={"kwargs": {**KWARGS, "tool": True}})})
    assert measured(server, run)["lost"] == 0
    later = [body["messages"] for body in server.requests if len(body["messages"]) > 1]
    assert later and {message["role"] for body in later for message in body} == {"user", "assistant"}
    texts = {"".join(part["text"] for part in body[-1]["content"] if part["type"] == "text") for body in later}
    assert all(text.startswith("<tool_response>\n") and text.endswith("\n</tool_response>") for text in texts)


def test_a_tools_reply_has_the_tokens_of_the_tool_role(tiny_folder: Path) -> None:
    codec = load_text_side(tiny_folder, ModelSection().pixels).codec
    reply = Message.of("tool", "Wrong", Image.new("RGB", (32, 32)), "Try again.")
    opening = [Message.of("user", "Find x."), Message.of("assistant", "12")]
    ids = [codec.encode_prompt([*opening, one]).token_ids for one in (reply, without_tool_role(reply))]
    assert ids[0].tolist() == ids[1].tolist()


def test_blank_and_swapped_images_are_what_the_server_gets(server: Server) -> None:
    known = answers()
    server.reply = lambda body: (200, said(f"<answer>{known.get(pictures(body)[0], 'none')}</answer>"))
    results = measured(server, run_of(), blind=True)
    assert results["accuracy/default"] == 1.0 and results["sight/accuracy_blank"] == 0.0
    own = list(known.values())
    same = sum(here == there for here, there in zip(own, own[1:] + own[:1], strict=True))
    assert results["sight/accuracy_swapped"] == pytest.approx(same / ITEMS)


def test_no_environment_is_left_open_where_the_other_items_image_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ShapesEnv.reset

    def reset(env: ShapesEnv, *, options: dict[str, Any], **more: Any) -> Any:
        if options["index"] == 1:
            raise RuntimeError("no such item")
        return opened(env, options=options, **more)

    async def ask(question: Question) -> Answer:
        raise AssertionError("there is nothing to ask")

    monkeypatch.setattr(ShapesEnv, "reset", reset)
    player = EndpointPlayer(run_of(), ask)
    task = replace(evaluation_tasks(run_of(), {"": ITEMS}, 0)[0], view="swapped", other_index=1)
    assert "no such item" in asyncio.run(player.play(task))
    assert player._pools.of(task).lent == 0  # what is lent is never closed
    player.close()


def test_a_reply_that_is_cut_off_or_endless_is_not_rewarded(server: Server) -> None:
    known = answers()
    server.reply = lambda body: (200, said(f"<answer>{known[pictures(body)[0]]}</answer>", "length"))
    assert measured(server, run_of())["accuracy/default"] == 0.0
    server.reply = lambda body: (200, said("x" * 9_000_000))
    with pytest.raises(EpisodesLostError):
        measured(server, run_of())


def test_a_server_that_refuses_ends_the_evaluation_soon(server: Server) -> None:
    server.reply = lambda body: (401, {"error": "no token"})
    with pytest.raises(EpisodesLostError):
        measured(server, run_of())
    assert len(server.requests) < ITEMS
    with pytest.raises(UserInputError, match="--adapter"):
        measured(server, run_of(), against="base")


@pytest.mark.slow
def test_the_command_needs_neither_ray_nor_a_model(server: Server) -> None:
    known = answers()
    server.reply = lambda body: (200, said(f"<answer>{known[pictures(body)[0]]}</answer>"))
    words = ["eval", "--endpoint", server.url, "--env", "Shapes-v0", "env.kwargs.task=count", f"--episodes={ITEMS}"]
    code = (
        "import sys; from rl_vlm.cli import app; code = app.run(sys.argv[1:]); "
        "assert not {'ray', 'torch'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accuracy/default"] == 1.0
