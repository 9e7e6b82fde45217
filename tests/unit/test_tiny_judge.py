"""The tiny judge: its lessons are right and say nothing by their form, no test picture is among them, and a run asks in their words."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

from rl_vlm.chat import ChatCodec
from rl_vlm.config import load_config
from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.rewards.judged import quoted
from rl_vlm.types import EncodedImage, Message
from rl_vlm.zoo.caption.grading import grade_caption
from rl_vlm.zoo.caption.lesson import QUESTION, judge_lesson, random_comparison
from rl_vlm.zoo.drawing import render
from rl_vlm.zoo.scenes.data import caption_of
from rl_vlm.zoo.tiny import model as tiny

ROOT = Path(__file__).parents[2]


def test_the_right_choice_is_the_caption_with_the_higher_score() -> None:
    rng = Random(0)
    choices = []
    for _ in range(300):
        one = random_comparison(rng, "train")
        scores = [grade_caption(caption, [caption_of(one.scene)]).score for caption in one.captions]
        assert abs(scores[0] - scores[1]) >= 0.1
        _, (_, question), reply = judge_lesson(one)
        description, _, choice = reply.partition(": ")
        assert description == caption_of(one.scene) and choice == ("1" if scores[0] > scores[1] else "2")
        assert question == f'1 "{one.captions[0]}" 2 "{one.captions[1]}" Which fits?'
        choices.append(choice)
    assert 0.4 < choices.count("1") / 300 < 0.6


def test_a_run_asks_in_the_words_of_the_lessons() -> None:
    processor = tiny.build_processor("judge")
    codec = ChatCodec(processor.tokenizer, processor.chat_template, processor.image_token)
    settings = load_config(ROOT / "configs/caption_judge_tiny.yaml").env.reward.judge
    assert settings.question == QUESTION
    one = random_comparison(Random(5), "train")
    texts = [quoted(caption, settings.max_chars) for caption in one.captions]
    question = settings.question.replace("{first}", texts[0]).replace("{second}", texts[1])
    example = DialogueEncoder(processor).encode_chat([judge_lesson(one)])
    from PIL import Image

    image = EncodedImage.from_pil(Image.fromarray(render(one.scene)))
    asked = codec.encode_prompt([Message.of("user", image, question)]).token_ids.tolist()
    ids = example.token_ids.tolist()
    single = [ids[0], *(b for a, b in pairwise(ids) if (a, b) != (codec.image_token_id,) * 2)]
    assert single[: len(asked)] == asked and not example.targets[: len(ids) - len(single) + len(asked)].any()
    longest = (
        "a yellow triangle at the bottom right, a yellow square at the top right and a green circle at the top left: 1"
    )
    assert len(processor.tokenizer.tokenize(longest)) < settings.answer_tokens
    assert len(processor.tokenizer.tokenize("a yellow triangle at the bottom right")) == 7
