"""The VLM labeller over a real engine: orders, steps, probabilities, deadlines, failures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from core_support import plain_model, processor, text_side
from label_support import pair, random_pairs, segment
from PIL import Image
from tables import table

from rl_vlm.asking import Answer, EndpointError, Question, ServedEndpoint
from rl_vlm.chat import expand_image_tokens, mrope_positions
from rl_vlm.config import LabelsSection
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.labelling.answers import read_label, read_score
from rl_vlm.labelling.labeller import ScoredPairs, VLMLabeller
from rl_vlm.labelling.labels import Label, Labeller, SegmentPair, encode, picture_of
from rl_vlm.labelling.prompts import TASKS, load_prompts, task_prompts
from rl_vlm.labelling.templates import Templates
from rl_vlm.models.families.qwen_vl import patchify
from rl_vlm.preference.sessions import LabellerDownError, label_session
from rl_vlm.testing import EngineClient, ScriptedEndpoint
from rl_vlm.types import Message, UserInputError

PROMPTS = task_prompts("cartpole")


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, max_context=2048)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def endpoint(engine: TransformersEngine, tiny_folder: Path) -> ServedEndpoint:
    return ServedEndpoint(EngineClient(engine), text_side(tiny_folder))


def one_step(**more: object) -> LabelsSection:
    return LabelsSection(**{"steps": 1, **more})  # type: ignore[arg-type]


def asked(labeller: Labeller, *pairs: SegmentPair) -> list[Label]:
    return asyncio.run(labeller.label(pairs))


def test_probabilities_are_the_models_own(endpoint: ServedEndpoint, tiny_folder: Path) -> None:
    shown = pair(3, 20)
    (label,) = asked(VLMLabeller(endpoint, PROMPTS, one_step(both_orders=False)), shown)
    first, second = (Image.fromarray(part.frames[0]) for part in (shown.first, shown.second))  # type: ignore[index]
    templates = PROMPTS.templates
    asked_for = PROMPTS.fill(templates.decide)
    message = Message.of("user", templates.first, first, templates.second, second, asked_for)
    # An independent way to the same numbers: the logits that the model gives to the first tokens of the three labels.
    logits = next_logits(tiny_folder, message, [first, second])
    starts = [processor(tiny_folder).tokenizer(choice)["input_ids"][0] for choice in ("0", "1", "-1")]
    expected = torch.softmax(logits[starts], 0).tolist()
    assert label.error == "" and label.probabilities == pytest.approx(expected, abs=1e-5)
    assert label.value == [0, 1, -1][int(np.argmax(expected))]


def next_logits(folder: Path, message: Message, images: list[Image.Image]) -> torch.Tensor:
    """float32 [V]: the plain model's logits after the prompt."""
    text = text_side(folder)
    parts = [patchify(text.images, image) for image in images]
    grids = tuple(grid for _, grid in parts)
    spans = [np.full(text.images.num_image_tokens(grid), text.codec.image_token_id) for grid in grids]
    ids = expand_image_tokens(text.codec.encode_prompt([message]).token_ids, text.codec.image_token_id, spans)
    positions = mrope_positions(ids, text.codec.image_token_id, grids, text.images.merge_size)
    with torch.no_grad():
        out = plain_model(folder)(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None],
            position_ids=torch.from_numpy(positions)[:, None],
            pixel_values=torch.from_numpy(np.concatenate([patches for patches, _ in parts])),
            image_grid_thw=torch.tensor(grids),
        )
    return out.logits[0, -1]


def test_both_orders_are_asked_and_averaged(endpoint: ServedEndpoint) -> None:
    there, back = pair(3, 20), pair(20, 3)
    single = VLMLabeller(endpoint, PROMPTS, one_step(both_orders=False))
    given, swapped = asked(single, there, back)
    labeller = VLMLabeller(endpoint, PROMPTS, one_step())
    (both,) = asked(labeller, there)
    flipped = {0: 1, 1: 0, -1: -1}[swapped.value]
    assert both.answers == (given.value, flipped)
    assert both.value == (given.value if given.value == flipped else -1)
    assert given.probabilities is not None and swapped.probabilities is not None
    mean = [(a + b) / 2 for a, b in zip(given.probabilities, np.array(swapped.probabilities)[[1, 0, 2]], strict=True)]
    assert both.probabilities == pytest.approx(mean, abs=1e-6) and sum(mean) == pytest.approx(1)
    assert labeller.stats.questions == 2 and labeller.stats.disagreements == (given.value != flipped)
    assert labeller.stats.prompt_tokens > 100 and labeller.stats.sampled_tokens >= 4


def test_two_steps_ask_the_second_in_text_only() -> None:
    script = ScriptedEndpoint(lambda question: "1" if question.choices else "<think>hm {x}</think>Image 2 is {better}.")
    (label,) = asked(VLMLabeller(script, PROMPTS, LabelsSection(both_orders=False)), pair(20, 3))
    describe, summarise = script.questions
    assert len(describe.messages[0].images) == 2 and describe.choices == () and describe.max_new_tokens == 512
    assert not summarise.messages[0].images and "Image 2 is {better}." in summarise.messages[0].text
    assert "hm" not in summarise.messages[0].text and summarise.choices == ("0", "1", "-1")
    assert label.value == 1


@pytest.mark.parametrize("text", ["0.7", "The goal is better achieved in Image 1."])
def test_an_answer_that_is_not_understood_is_asked_about_once_more_and_then_undecided(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    script = ScriptedEndpoint(lambda question: text)
    labeller = VLMLabeller(script, PROMPTS, one_step(guided=False, both_orders=False))
    (label,) = asked(labeller, pair(3, 20))
    first, second = script.questions
    assert first.choices == second.choices == ()
    assert first.messages[0].images and not second.messages[0].images and text in second.messages[0].text
    assert label.value == -1 and label.answers == (-1,) and not label.error
    assert labeller.stats.not_understood == 1
    assert "In a session of 1, 1 answers were neither a label nor a score" in caplog.text


@pytest.mark.parametrize("first", [Answer("Hm, 0 drawers."), Answer("0", cut_off=True)], ids=["free", "cut off"])
def test_the_second_question_decides_what_the_first_answer_did_not(first: Answer) -> None:
    # The endpoint ignores the choices where pictures are shown, and keeps to them in plain text.
    script = ScriptedEndpoint(lambda question: first if question.messages[0].images else "1")
    labeller = VLMLabeller(script, PROMPTS, one_step(both_orders=False))
    (label,) = asked(labeller, pair(3, 20))
    assert label.value == 1 and script.questions[1].choices == ("0", "1", "-1")
    assert labeller.stats.not_understood == 0


@pytest.mark.parametrize("text", ["", "  ", "<think>Image 1 is better, so 0"])
def test_an_answer_without_a_word_is_an_error_and_no_label(text: str) -> None:
    labeller = VLMLabeller(ScriptedEndpoint(lambda question: text), PROMPTS, one_step(guided=False))
    (label,) = asked(labeller, pair(3, 20))
    assert "decides nothing" in label.error and label.answers == () and labeller.stats.errors == 1


@pytest.mark.parametrize(("second", "value"), [("0.7", 0.7), ("-1", None), ("open", None)])
def test_a_score_that_is_not_understood_is_asked_about_once_more(second: str, value: float | None) -> None:
    script = ScriptedEndpoint(lambda question: "The pole leans a little." if question.messages[0].images else second)
    labeller = VLMLabeller(script, PROMPTS, one_step(guided=False))
    (score,) = asyncio.run(labeller.score([segment([3]).frames[0]]))  # type: ignore[index]
    assert score.value == value and bool(score.error) == (second == "open") == bool(labeller.stats.not_understood)
    assert "leans a little" in script.questions[1].messages[0].text


@pytest.mark.parametrize(
    ("scale", "answer", "value"),
    [
        ("rating", Answer("Good.", probabilities=None), 0.75),
        ("rating", Answer("good", probabilities={"terrible": 0, "poor": 0, "fair": 0.5, "good": 0.25, "excellent": 0.25}), 0.6875),
        ("success", Answer("It is true"), 1.0),
        ("success", Answer("False", probabilities={"False": 0.9, "True": 0.1}), 0.1),
        ("success", Answer("perhaps"), None),
        ("rating", Answer("good or poor"), None),
    ],
)  # fmt: skip
def test_a_word_is_a_score_by_its_place_and_probability(scale: Any, answer: Answer, value: float | None) -> None:
    script = ScriptedEndpoint(lambda question: answer)
    labeller = VLMLabeller(script, PROMPTS, LabelsSection(scale=scale, guided="reason"))
    (score,) = asyncio.run(labeller.score([segment([3]).frames[0]]))  # type: ignore[index]
    assert score.value == (None if value is None else pytest.approx(value)) and bool(score.error) == (value is None)
    assert len(script.questions) == 1 and len(script.questions[0].choices) == (5 if scale == "rating" else 2)


def test_pairs_by_scores_prefer_the_higher_one() -> None:
    likely = {3: 0.7, 10: 0.2, 20: 0.7}
    shown = {encode(segment([angle]).frames[0]).sha256: share for angle, share in likely.items()}  # type: ignore[index]

    def answer(question: Question) -> Answer:
        share = shown[question.messages[0].images[0].sha256]
        return Answer(str(share > 0.5), probabilities={"True": share, "False": 1 - share})

    labeller = ScoredPairs(VLMLabeller(ScriptedEndpoint(answer), PROMPTS, LabelsSection(scale="success")))
    assert [label.value for label in asked(labeller, pair(3, 10), pair(10, 3), pair(3, 20))] == [0, 1, -1]
    assert labeller.stats.questions == 6


def test_a_reason_comes_before_the_label_in_every_guided_answer(endpoint: ServedEndpoint) -> None:
    labeller = VLMLabeller(endpoint, PROMPTS, one_step(guided="reason", temperature=1.0))
    for label in asked(labeller, *random_pairs(4)):
        assert not label.error and label.probabilities is None and len(label.answers) == 2
        answers = re.fullmatch(r"\[given\] (\{.*\})\n\[swapped\] (\{.*\})", label.text, re.DOTALL)
        assert answers is not None
        given, swapped = map(json.loads, answers.groups())
        assert all(list(said) == ["reason", "verdict"] and len(said["reason"]) <= 400 for said in (given, swapped))
        assert label.answers == (given["verdict"], {0: 1, 1: 0, -1: -1}[swapped["verdict"]])
    assert labeller.stats.not_understood == 0 and labeller.stats.questions == 8


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"reason": "Image 2 is nearer.", "verdict": 1}', 1), ('{"reason": "1\\n0", "verdict": -1}', -1),
     ('{"reason": "Image 2 is nearer.", "verdict": 0}', -1), ('{"verdict": 0}', -1), ("[0]", 0), ("0", 0)],
)  # fmt: skip
def test_a_verdict_that_its_reason_contradicts_is_no_label(text: str, value: int) -> None:
    script = ScriptedEndpoint(lambda question: text)
    (label,) = asked(VLMLabeller(script, PROMPTS, one_step(guided="reason", both_orders=False)), pair(3, 20))
    assert label.value == value
    assert all(question.grammar and not question.choices for question in script.questions)
    assert script.questions[0].messages[0].text.endswith('{"reason": "...", "verdict": ...}')


def test_identical_pictures_are_not_asked_about() -> None:
    script = ScriptedEndpoint(lambda question: "0")
    (label,) = asked(VLMLabeller(script, PROMPTS), pair(5, 5))
    assert label.value == -1 and not label.error and script.questions == []


def test_one_failure_leaves_the_other_labels() -> None:
    def answer(question: Question) -> str:
        if broken.sha256 in [image.sha256 for image in question.messages[0].images]:  # type: ignore[union-attr]
            raise EndpointError("refused", retryable=False)
        return "0"

    pairs = random_pairs(3)
    broken = encode(picture_of(pairs[1].first))
    labels = asked(VLMLabeller(ScriptedEndpoint(answer), PROMPTS, one_step(both_orders=False)), *pairs)
    assert [label.error for label in labels] == ["", "refused", ""]
    assert [label.value for label in labels if not label.error] == [0, 0]


def test_pairs_that_nobody_is_asked_about_do_not_hide_a_labeller_that_is_down() -> None:
    def down(question: Question) -> str:
        raise EndpointError("connection refused", retryable=False)

    labeller, pairs = (
        VLMLabeller(ScriptedEndpoint(down), PROMPTS, one_step()),
        [pair(7, 7), *random_pairs(2), pair(9, 9)],
    )
    with pytest.raises(LabellerDownError):
        asyncio.run(label_session(labeller, lambda count: pairs, 4, max_rounds=4, max_pairs=99))


def test_undecided_pairs_are_topped_up() -> None:
    draws: list[int] = []

    def draw(count: int) -> list[SegmentPair]:
        draws.append(count)
        # Half of every draw is two times the same picture.
        return [pair(3, 20) if k % 2 else pair(7, 7) for k in range(count)]

    class Upright(Labeller):
        async def label(self, pairs: list[SegmentPair]) -> list[Label]:
            return [Label(-1 if p.first.true_rewards.sum() == p.second.true_rewards.sum() else 0) for p in pairs]

    def decided(max_rounds: int = 4, max_pairs: int = 99) -> tuple[int, int]:
        draws.clear()
        pairs, labels = asyncio.run(label_session(Upright(), draw, 8, max_rounds, max_pairs))
        return len(pairs), sum(label.is_decided for label in labels)

    assert decided() == (15, 7) and draws == [8, 4, 2, 1]
    assert decided(max_rounds=1) == (8, 4)
    assert decided(max_pairs=11)[0] == 11 and draws == [8, 3]


def test_pictures_of_a_segment_stand_side_by_side() -> None:
    long = segment([0, 1, 2, 3, 4, 5, 6, 7], size=32)
    assert long.frames is not None
    assert (picture_of(long) == long.frames[7]).all()
    # As in the original: every (8 // 3)-th frame, counted back from the last.
    assert (picture_of(long, 3) == np.concatenate([long.frames[3], long.frames[5], long.frames[7]], axis=1)).all()
    short = segment([1, 2], size=32)
    assert (picture_of(short, 3) == np.concatenate([short.frames[1]] * 3, axis=1)).all()  # type: ignore[index]


def test_seeds_differ_by_session_pair_order_and_step_and_come_back_after_a_restart() -> None:
    script = ScriptedEndpoint(lambda question: "0" if question.choices else "text")
    labeller = VLMLabeller(script, PROMPTS, LabelsSection(), seed=5)
    asked(labeller, *random_pairs(2))
    state = labeller.state()
    asked(labeller, *random_pairs(2))
    seeds = [question.seed for question in script.questions]
    assert len(set(seeds)) == 16
    again = ScriptedEndpoint(script.answer)
    resumed = VLMLabeller(again, PROMPTS, LabelsSection(), seed=5)
    resumed.set_state(state)
    asked(resumed, *random_pairs(2))
    assert sorted(question.seed for question in again.questions) == sorted(seeds[8:])


# --- Of a labeller's answers only the labels and scores that were asked for are read


ANSWERS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "label_answers.yaml").read_text())


@pytest.mark.parametrize(("answer", "label"), ANSWERS["labels"])
def test_an_answer_is_its_label_or_is_not_understood(answer: str, label: int | None) -> None:
    assert read_label(answer) == label


@pytest.mark.parametrize(("answer", "score"), ANSWERS["scores"])
def test_an_answer_is_its_score_or_is_not_understood(answer: str, score: float | None) -> None:
    assert read_score(answer) == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize("noise", ["so, ", "Image 1 ", "0, 1, ", "<think>", "( ", "1 ", "0\n"])
def test_long_answers_take_time_in_proportion_to_their_length(noise: str) -> None:
    long = noise * 200_000  # an expression that backtracks would not end
    assert read_label(f"{long}</think>1") == 1 and read_score(f"{long}</think>0.5") == 0.5
    assert read_label(long + "x") is None and read_score(long + "x") is None


# --- Prompts: every task of RL-VLM-F has a goal, users bring their own, and mistakes are named


TABLES = table("label_tasks")


@pytest.mark.parametrize(("original", "ours"), TABLES["names_of_the_original_lead_to_prompts"])
def test_names_of_the_original_lead_to_prompts(original: str, ours: str) -> None:
    prompts = task_prompts(original)
    assert prompts == TASKS[ours]
    assert prompts.goal.startswith("to ") and prompts.description.endswith(".")


def test_users_bring_goals_and_templates(tmp_path: Path) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text(
        "press: to press the button\n"
        "drawer-open:\n  goal: to close the drawer\n  description: Closed.\n"
        "  templates: {decide: 'Which is nearer to the goal {goal}? 0, 1 or -1.'}\n"
    )
    assert task_prompts("press", file).goal == "to press the button"
    own = task_prompts("metaworld_drawer-open-v2", file)
    assert (own.goal, own.description) == ("to close the drawer", "Closed.")
    assert own.fill(own.templates.decide) == "Which is nearer to the goal to close the drawer? 0, 1 or -1."
    assert own.templates.first == Templates().first
    assert task_prompts("soccer", file) == TASKS["soccer"]


@pytest.mark.parametrize(("text", "message"), table("refused_settings")["label_prompts"])
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text(text)
    with pytest.raises(UserInputError, match=message.replace("{", "\\{")):
        load_prompts(file)


def test_a_file_may_name_a_task_as_the_original_does(tmp_path: Path) -> None:
    """Silently asking our own question instead would be the worst of answers."""
    file = tmp_path / "prompts.yaml"
    file.write_text("metaworld_soccer-v2: to kick the ball into the goal, in my own words\n")
    for task in ("metaworld/soccer-v3", "metaworld_soccer-v2", "soccer"):
        assert "in my own words" in task_prompts(task, file).goal
