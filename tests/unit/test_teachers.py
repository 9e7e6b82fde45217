"""Labellers without a chat model: the scripted teacher keeps B-Pref's rules, similarity is the model's own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_support import pair, random_pairs
from pydantic import ValidationError
from scipy.special import expit
from scipy.stats import binomtest

from rl_vlm.config import LabelsSection, TeacherSection, parse_config
from rl_vlm.labelling.building import build_labeller
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.labels import SKIPPED, Label, Segment, SegmentPair
from rl_vlm.labelling.similarity import Similarity
from rl_vlm.labelling.teachers import ScriptedTeacher
from rl_vlm.preference.feedback import build_feedback
from rl_vlm.types import UserInputError


def by_rewards(first: list[float], second: list[float]) -> SegmentPair:
    def part(rewards: list[float]) -> Segment:
        steps = len(rewards)
        return Segment(
            np.zeros((steps, 2), np.float32), np.zeros((steps, 1), np.float32), np.array(rewards, np.float32)
        )

    return SegmentPair(part(first), part(second))


def labels(teacher: Any, *pairs: SegmentPair) -> list[Label]:
    return asyncio.run(teacher.label(list(pairs)))


def test_a_rational_teacher_prefers_the_higher_return() -> None:
    found = labels(
        ScriptedTeacher(), by_rewards([1, 2], [2, 2]), by_rewards([5, 0], [1, 1]), by_rewards([1, 2], [2, 1])
    )
    assert [label.value for label in found] == [1, 0, -1]


@pytest.mark.parametrize("beta", [-1.0, 1.0])
def test_an_unknown_reward_is_no_label(beta: float) -> None:
    teacher = ScriptedTeacher(TeacherSection(beta=beta))
    found = labels(teacher, by_rewards([np.nan], [1]), by_rewards([1], [np.inf]), by_rewards([1], [2000]))
    assert [(label.value, bool(label.error)) for label in found] == [(-1, True), (-1, True), (1, False)]


def test_gamma_discounts_earlier_steps() -> None:
    # 0.5 · 4 + 1 = 3 against 0.5 · 1 + 3 = 3.5, although the plain sums are 5 and 4.
    discounting = ScriptedTeacher(TeacherSection(gamma=0.5))
    assert [label.value for label in labels(discounting, by_rewards([4, 1], [1, 3]))] == [1]
    assert [label.value for label in labels(ScriptedTeacher(), by_rewards([4, 1], [1, 3]))] == [0]


@pytest.mark.parametrize("difference", [-2.0, 0.0, 0.7])
def test_beta_makes_a_bradley_terry_teacher(difference: float) -> None:
    teacher = ScriptedTeacher(TeacherSection(beta=1.5), seed=3)
    found = labels(teacher, *[by_rewards([1.0], [1.0 + difference])] * 2000)
    seconds = sum(label.value == 1 for label in found)
    assert binomtest(seconds, 2000, expit(1.5 * difference)).pvalue > 1e-3


def test_mistakes_come_at_their_rate() -> None:
    found = labels(ScriptedTeacher(TeacherSection(eps_mistake=0.2), seed=1), *[by_rewards([0], [1])] * 2000)
    assert binomtest(sum(label.value == 0 for label in found), 2000, 0.2).pvalue > 1e-3


def test_thresholds_scale_with_the_policys_return() -> None:
    teacher = ScriptedTeacher(TeacherSection(eps_skip=0.5, eps_equal=0.1))
    cases = [by_rewards([1, 1], [0, 1]), by_rewards([4, 4], [4, 4.5]), by_rewards([4, 4], [9, 0])]
    assert [label.value for label in labels(teacher, *cases)] == [0, 1, 1]  # no margin yet
    teacher.set_margin(mean_return=500, segment_length=2, horizon=100)  # 10 per segment
    poor, near, clear = labels(teacher, *cases)
    assert poor.error == SKIPPED and (near.value, near.error) == (-1, "") and clear.value == 1 and not clear.error


def test_a_resumed_teacher_goes_on_where_it_stopped() -> None:
    def teacher() -> ScriptedTeacher:
        return ScriptedTeacher(TeacherSection(eps_mistake=0.3), seed=7)

    first = teacher()
    labels(first, *random_pairs(5))
    state = json.loads(json.dumps(first.state()))
    expected = labels(first, *random_pairs(20, seed=1))
    resumed = teacher()
    resumed.set_state(state)
    assert labels(resumed, *random_pairs(20, seed=1)) == expected


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of a few thousand random weights, with a tokenizer of letters."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz."]
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: place for place, token in enumerate(tokens)}, merges=[])
    text = {"vocab_size": len(tokens), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config={**text, "intermediate_size": 32, "eos_token_id": len(tokens) - 1, "pad_token_id": 0},
            vision_config={**vision, "intermediate_size": 32},
            projection_dim=8,
        )
    )
    folder = tmp_path_factory.mktemp("clip")
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def test_clip_similarity_is_the_models_own(clip_folder: Path) -> None:
    from transformers import CLIPModel, CLIPProcessor

    pairs = random_pairs(3, seed=2)
    frames = np.stack([part.frames[0] for one in pairs for part in (one.first, one.second)])  # type: ignore[index]
    similarity = Similarity(["clip"], clip_folder, "the pole is upright.")
    found = similarity.similarities(frames)
    model, processor = CLIPModel.from_pretrained(clip_folder), CLIPProcessor.from_pretrained(clip_folder)
    inputs = processor(text=["the pole is upright."], images=list(frames), return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits_per_image[:, 0] / model.logit_scale.exp()
    np.testing.assert_allclose(found, logits.numpy(), atol=1e-5)
    labelled = labels(similarity, *pairs)
    assert [label.value for label in labelled] == [int(b > a) for a, b in found.reshape(-1, 2)]
    np.testing.assert_allclose(similarity.rewards(frames), 2 * found - 1, atol=1e-6)
    assert similarity.input_kind == "image"
    scores = asyncio.run(similarity.score(list(frames)))
    assert [score.value for score in scores] == pytest.approx(np.maximum(found, 0).tolist())


def test_image_text_matching_is_the_models_own(tmp_path: Path) -> None:
    from transformers import (
        BertTokenizer,
        Blip2Config,
        Blip2ForImageTextRetrieval,
        Blip2Processor,
        BlipImageProcessor,
    )

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "pole", "is", "upright", "."]
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    qformer = {"vocab_size": len(words), "use_qformer_text_input": True, "encoder_hidden_size": 16}
    torch.manual_seed(0)
    config = Blip2Config(
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        qformer_config={**vision, **qformer, "cross_attention_frequency": 1},
        num_query_tokens=4,
        image_text_hidden_size=8,
    )
    Blip2ForImageTextRetrieval(config).save_pretrained(tmp_path)
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(words)})
    images = BlipImageProcessor(size={"height": 32, "width": 32})
    Blip2Processor(images, tokenizer).save_pretrained(tmp_path)
    frames = np.stack([part.frames[0] for one in random_pairs(2) for part in (one.first, one.second)])  # type: ignore[index]
    found = Similarity(["blip-2"], tmp_path, "the pole is upright.").similarities(frames)
    model = Blip2ForImageTextRetrieval.from_pretrained(tmp_path).eval()
    processor = Blip2Processor.from_pretrained(tmp_path)
    for frame, probability in zip(frames, found, strict=True):
        inputs = processor(images=frame, text="the pole is upright.", return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs, use_image_text_matching_head=True).logits_per_image
        assert probability == pytest.approx(torch.softmax(logits, 1)[0, 1].item(), abs=1e-5)


def test_a_model_that_is_missing_or_of_another_kind_is_named(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UserInputError, match="openai/clip"):
        Similarity(["clip"], "openai/clip-vit-none", "x")
    with pytest.raises(UserInputError, match="qwen3_vl"):
        Similarity(["clip"], tiny_folder, "x")
    with pytest.raises(UserInputError, match="description"):
        Similarity(["clip"], tiny_folder, " ")


# --- The configuration of labels and reward model: defaults, mistakes, and what is built from it


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 3}, "steps"),
        ({"source": "endpoint"}, "endpoint.url is needed"),
        ({"source": "cache"}, "must name a label store"),
        ({"source": "cache", "cache": "None"}, "must name a label store"),
        ({"source": "cache", "cache": "store", "coin_flips": True}, "replayed as they were labelled: leave out one"),
        ({"source": "vlm", "cache": "store", "flip": True}, "replayed as they were labelled: leave out one"),
        ({"teacher": {"eps_mistake": 2}}, "eps_mistake"),
        ({"teacher": {"gamma": 0.0}}, "gamma"),
        ({"orders": 1}, "orders"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LabelsSection(**wrong)


def test_labellers_are_built_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = build_labeller(LabelsSection(source="scripted", teacher={"eps_mistake": 1.0}))  # type: ignore[arg-type]
    assert isinstance(teacher, ScriptedTeacher)
    assert asyncio.run(teacher.label([pair(3, 20)]))[0].value == 1  # always mistaken
    generate = build_labeller(LabelsSection(source="generate"), env_id="CartPole-v1")
    assert isinstance(generate, VLMLabeller)
    endpoint = {"url": "http://h/v1", "token_env": "TOKEN_OF_TEST"}
    monkeypatch.setenv("TOKEN_OF_TEST", "t")
    assert isinstance(build_labeller(LabelsSection(source="endpoint", endpoint=endpoint), env_id="soccer"), VLMLabeller)  # type: ignore[arg-type]
    with pytest.raises(UserInputError, match="served model"):
        build_labeller(LabelsSection(), env_id="soccer")


@pytest.mark.parametrize(("source", "family"), [("clip", "clip"), ("itm", "blip-2")])
def test_reward_model_and_labeller_compute_on_the_device_of_the_run(
    source: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("rl_vlm.labelling.building.Similarity", lambda *given: found.append(given))
    monkeypatch.setattr("rl_vlm.preference.feedback.driver_device", lambda run: "meta")
    preference = {"reward": "learn_from_preference", "labels": {"source": source, "frames": 2, "task": "soccer"}}
    run = parse_config(
        {"algorithm": {"name": "preference_sac"}, "env": {"id": "ContinuousCartPole-v0"}, "preference": preference}
    )
    feedback = build_feedback(run, tmp_path, (None, None), (4, 1))
    ((families, _, text, *rest),) = found
    assert family in families and text == "The soccer ball is in the goal." and rest == ["meta", 2]
    assert feedback is not None and feedback.model.device == "meta"
