"""NLVR2-v0 and Caption-v0: what is shown, what is paid, what info holds, rows of data sets, and gymnasium's own checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import png

import rl_vlm
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.rows import BadRowError
from rl_vlm.types import Message
from rl_vlm.zoo.scenes.data import caption_item, caption_of, pair_item, picture_of


def opening(env: VisionEnv, index: int = 0, split: str = "train") -> Message:
    observation, _ = env.reset(options={"index": index, "split": split})
    (message,) = observation.messages
    return message


# --- drawn


def test_a_pair_is_shown_left_then_right_then_the_sentence() -> None:
    env = rl_vlm.make("NLVR2-v0")
    pair = pair_item("train", 3)
    message = opening(env, 3)
    assert [getattr(part, "sha256", part) for part in message.parts[:2]] == [
        picture_of(pair.left).sha256, picture_of(pair.right).sha256,
    ]  # fmt: skip
    assert message.text.startswith(f"{pair.statement}\n") and "True or False" in message.text
    assert opening(rl_vlm.make("NLVR2-v0", prompt="brief"), 3).text == f"{pair.statement} True or False?"


@pytest.mark.parametrize(
    ("answer", "verdict", "reason"), [("True", True, ""), ("False.", False, ""), ("True False", None, "both")]
)
def test_the_right_word_pays_one_and_all_else_nothing(answer: str, verdict: bool | None, reason: str) -> None:
    env = rl_vlm.make("NLVR2-v0")
    for index in range(4):
        pair = pair_item("test", index)
        opening(env, index, "test")
        observation, reward, terminated, truncated, info = env.step(answer)
        assert (reward, terminated, truncated, observation.messages) == (float(verdict == pair.truth), True, False, ())
        assert info == {
            "correct": verdict == pair.truth, "verdict": verdict, "reason": reason, "well_formed": verdict is not None,
            "label": pair.truth, "kind": pair.statement.kind,
        }  # fmt: skip


def test_a_caption_is_paid_by_its_agreement_with_the_reference() -> None:
    env = rl_vlm.make("Caption-v0", prompt="brief")
    truth = caption_of(caption_item("train", 1))
    assert opening(env, 1).text == "Caption?"
    _, reward, terminated, _, info = env.step(truth)
    assert (reward, terminated) == (1.0, True)
    assert info == {
        "score": 1.0, "f1": 1.0, "precision": 1.0, "recall": 1.0, "length": 1.0, "reason": "", "well_formed": True, "reference": truth,
    }  # fmt: skip
    opening(env, 1)
    assert 0 < env.step(truth.split(" and ")[0])[1] < 1
    opening(env, 1)
    assert env.step("<|im_end|>" + truth)[4]["reason"] == "special"


# --- rows


def write_pairs(folder: Path, **changes: Any) -> str:
    rows = {
        "sentence": ["One is red.", "Both are blue.", "Both are red."],
        "left_image": [{"bytes": png("red")}, {"bytes": png("red")}, {"bytes": png("red")}],
        "right_image": [{"bytes": png("blue")}, {"bytes": png("blue")}, {"bytes": png("red")}],
        "label": ["True", "False", "true"],
    }
    pq.write_table(pa.table({**rows, **changes}), folder / "train.parquet")
    return str(folder)


@pytest.mark.parametrize("labels", [["True", "False", "true"], [True, False, True], [1, 0, 1]])
def test_rows_of_nlvr2_are_asked_and_paid(labels: list[Any], tmp_path: Path) -> None:
    env = rl_vlm.make("NLVR2-v0", data=write_pairs(tmp_path, label=labels))
    assert (env.num_items("train"), env.validate("train")) == (3, 3)
    for index, right in enumerate(("True", "False", "True")):
        message = opening(env, index)
        assert message.images[0].to_pil().getpixel((0, 0)) == (255, 0, 0)
        _, reward, _, _, info = env.step(right)
        assert (reward, info["kind"]) == (1.0, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": ["maybe", "True", "True"]}, "row 0: the label is 'maybe'; it must be True or False"),
        ({"label": [None, "True", "True"]}, "row 0: the label is 'None'"),
        ({"right_image": [{"bytes": None}] * 3}, "row 0(; .*)?: image 1 has neither bytes nor a path"),
    ],
)
def test_a_bad_row_of_nlvr2_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    env = rl_vlm.make("NLVR2-v0", data=write_pairs(tmp_path, **changes))
    with pytest.raises(BadRowError, match=message):
        env.reset(options={"index": 0})
    with pytest.raises(BadRowError, match=message):
        env.validate("train")


def test_rows_with_captions_are_asked_and_paid(tmp_path: Path) -> None:
    images = [{"bytes": png("red")}, {"bytes": png("blue")}]
    for split, captions in (
        ("train", ["a red wall", "a blue wall"]),
        ("test", [["a red wall", "paint"], ["a blue wall"]]),
    ):
        pq.write_table(pa.table({"image": images, "caption": captions}), tmp_path / f"{split}.parquet")
    env = rl_vlm.make("Caption-v0", data=str(tmp_path))
    opening(env, 0)
    assert env.step("A red wall.")[1] == 1.0
    opening(env, 0, "test")
    assert env.step("paint")[1] == 1.0
    opening(env, 1, "test")
    assert env.step("paint")[1] == 0.0


@pytest.mark.parametrize("caption", ["", None, []])
def test_a_row_without_a_caption_is_named(caption: Any, tmp_path: Path) -> None:
    table = pa.table(
        {
            "image": [{"bytes": png("red")}],
            "caption": pa.array([caption], None if caption != [] else pa.list_(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(BadRowError):
        rl_vlm.make("Caption-v0", data=str(tmp_path)).reset(options={"index": 0})
