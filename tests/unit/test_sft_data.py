"""Conversations of files: which forms are read, and the one sentence that a bad row gets."""

from __future__ import annotations

import base64
import functools
import io
import json
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from core_support import conversation
from PIL import Image

from rl_vlm.config import load_sft_config
from rl_vlm.envs.base import EpisodeEnv, Item, Reply
from rl_vlm.envs.registry import make
from rl_vlm.models.loading import load_text_side
from rl_vlm.supervised.conversations import SFTConversation
from rl_vlm.supervised.dataset import JobData, open_job_data
from rl_vlm.supervised.example import write_answers, write_example, write_kept
from rl_vlm.supervised.sources import open_conversations
from rl_vlm.types import EncodedImage, Message, Observation, UserInputError

REPLY = {"role": "assistant", "content": "Two."}


def png(colour: str = "red", size: tuple[int, int] = (32, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def row(content: Any, images: Any = None, **rest: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, REPLY], "images": images, **rest}


def shape(conversation: SFTConversation) -> list[tuple[str, list[str]]]:
    """Roles and parts, images by their colour."""
    names = {(255, 0, 0): "RED", (0, 0, 255): "BLUE"}

    def shown(part: Any) -> str:
        return names[part.to_pil().getpixel((0, 0))] if isinstance(part, EncodedImage) else part

    return [(message.role, list(map(shown, message.parts))) for message in conversation.messages]


# --- forms


HOW, MANY = ({"type": "text", "text": text} for text in ("How", " many?"))
BLUE = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
FORMS: dict[str, Any] = {
    "markers in the text": row("<image>How<image> many?", ["red.png", "blue.png"]),
    "parts in order": row([{"type": "image"}, HOW, {"type": "image"}, MANY], ["red.png", "blue.png"]),
    "parts that name their images": row(
        [{"type": "image", "image": "red.png"}, HOW, {"type": "image_url", "image_url": {"url": BLUE}}, MANY]
    ),
    "ShareGPT": {
        "image": ["red.png", "blue.png"],
        "conversations": [{"from": "human", "value": "<image>How<image> many?"}, {"from": "gpt", "value": "Two."}],
    },
    "some named and some not": row([{"type": "image"}, HOW, {"type": "image", "path": "blue.png"}, MANY], ["red.png"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_a_message_say_the_same(form: str, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png("red"))
    (tmp_path / "blue.png").write_bytes(png("blue"))
    (found,) = open_conversations(str(write_lines(tmp_path / "a.jsonl", [FORMS[form]])), "train")
    assert shape(found) == [("user", ["RED", "How", "BLUE", " many?"]), ("assistant", ["Two."])]
    assert found.where == f"{tmp_path}/a.jsonl, line 1"


def learned(tmp_path: Path, *said: dict[str, Any], **cells: Any) -> list[int]:
    """Which of the assistant's messages are learned, where they have these keys."""
    talk = [one for keys in said for one in (USER, {**REPLY, **keys})]
    (found,) = open_conversations(str(write_lines(tmp_path / "a.jsonl", [{"messages": talk, **cells}])), "train")
    return [number // 2 for number in range(1, len(found.messages), 2) if number not in found.excluded]


def test_messages_that_the_data_exclude_are_shown_and_not_learned(tmp_path: Path) -> None:
    for keys in (
        {"weight": 0},
        {"weight": 0.0},
        {"loss": False},
        {"loss": "false"},
        {"loss_mask": "0"},
        {"trainable": 0},
    ):
        assert learned(tmp_path, keys, {}) == [1]
        assert learned(tmp_path, {}, keys) == [0]
    assert learned(tmp_path, {"train": True, "weight": None}, {"train": 1}) == [0, 1]
    for said, cells, message in (
        (({"weight": 0}, {"loss": False}), {}, "every message of the assistant is excluded"),
        (({"weight": 0.5}, {}), {}, "message 1 has weight: 0.5"),
        (({}, {"loss_mask": [0, 1]}), {}, "message 3 has loss_mask"),
        (({"loss_scale": 0}, {}), {}, "message 1 has loss_scale"),
        (({"loss": True, "weight": 0}, {}), {}, "message 1 has loss: True, weight: 0"),
        (({"content": [{"type": "text", "text": "2", "train": False}]}, {}), {}, "message 1 has a part with train"),
        (({}, {}), {"weight": 0}, "it is excluded as a whole"),
    ):
        with pytest.raises(UserInputError, match=message):
            learned(tmp_path, *said, **cells)


def test_an_excluded_message_has_no_target(tiny_folder: Path, tmp_path: Path) -> None:
    talk = [USER, REPLY | {"weight": 0}, USER, REPLY]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk}, {"messages": [USER, REPLY, USER, REPLY]}])
    excluded, whole = (
        job_data(tiny_folder, path).encoder.encode(one) for one in open_conversations(str(path), "train")
    )
    assert (excluded.token_ids == whole.token_ids).all()
    assert 2 * excluded.loss_mask.sum() == whole.loss_mask.sum() and excluded.turns == whole.turns[1:]


def test_parquet_image_folders_and_slices(tmp_path: Path) -> None:
    rows = [row(f"<image>{k}?", [{"bytes": png("red"), "path": None}]) for k in range(4)]
    (tmp_path / "p").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p" / "train-00000-of-00001.parquet")
    found = list(open_conversations(f"{tmp_path / 'p'}@[1:3]", "train"))
    assert [shape(one)[0] for one in found] == [("user", ["RED", "1?"]), ("user", ["RED", "2?"])]
    folder = tmp_path / "pictures"
    (folder / "test").mkdir(parents=True)
    for place in (folder, folder / "test"):
        (place / "a.png").write_bytes(png("blue"))
        lines = [{"messages": [{"role": "user", "content": place.name}, REPLY], "file_name": "a.png"}]
        write_lines(place / "metadata.jsonl", ["\n", *lines])
    (train,), (test,) = (open_conversations(str(folder), split) for split in ("train", "test"))  # type: ignore[arg-type]
    assert shape(train)[0] == ("user", ["BLUE", "pictures"]) and shape(test)[0] == ("user", ["BLUE", "test"])
    assert train.where.endswith("metadata.jsonl, line 2")  # empty lines count


def test_the_built_in_conversations_are_those_of_the_files_that_it_writes(tmp_path: Path) -> None:
    assert write_example(tmp_path / "data") == {"train": 500, "test": 200}
    for split in ("train", "test"):
        built_in, files = open_conversations("shapes", split), open_conversations(str(tmp_path / "data"), split)  # type: ignore[arg-type]
        assert len(built_in) == len(files)
        for index in (0, 7, 199):
            assert built_in[index].messages == files[index].messages
    with pytest.raises(UserInputError, match="choose another"):
        write_example(tmp_path / "data")


class Doubled(EpisodeEnv):
    """Two turns: a number, and its double."""

    def open(self, item: Item) -> Observation:
        self._wanted = item.index
        return Observation.user(Image.new("RGB", (32, 32), "red"), f"Say {item.index}.")

    def reply(self, text: str) -> Reply:
        reward, self._wanted = float(text == self.example()), 2 * self._wanted
        return Reply(reward, None if self.is_last_turn else Observation.user("Say twice that."))

    def example(self) -> str:
        return str(self._wanted)


def test_an_environments_own_answers_become_conversations(tmp_path: Path) -> None:
    env = Doubled(num_train=5, num_test=3, max_turns=2)
    assert write_answers(tmp_path / "data", env, "<answer>{}</answer>", 4, 9) == {"train": 4, "test": 1}
    found = open_conversations(str(tmp_path / "data"), "train")[3]
    assert [(message.role, message.text) for message in found.messages] == [
        ("user", "Say 3."),
        ("assistant", "3"),
        ("user", "Say twice that."),
        ("assistant", "6"),
    ]
    assert [image.to_pil().getpixel((0, 0)) for image in found.messages[0].images] == [(255, 0, 0)]


def test_truths_of_data_become_answers_of_a_form(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"question": "How many?", "answer": k, "image": "a.png"} for k in range(3)])
    (tmp_path / "a.png").write_bytes(png())
    rows = tmp_path / "rows.jsonl"
    env = make("QA-v0", data={"train": f"{rows}@[:2]", "test": f"{rows}@[2:]"})
    assert write_answers(tmp_path / "data", env, "It is {}.", 100, 1) == {"train": 2, "test": 1}
    assert open_conversations(str(tmp_path / "data"), "test")[0].messages[1].text == "It is 2."
    with pytest.raises(UserInputError, match="once"):
        write_answers(tmp_path / "other", env, "It is.", 100, 1)
    with pytest.raises(UserInputError, match="example"):
        write_answers(tmp_path / "third", make("Shapes-v0"), "{}", 100, 1)
    assert not (tmp_path / "third").exists()


def test_good_episodes_become_conversations(tmp_path: Path, tiny_folder: Path) -> None:
    """Of nine episodes that say 0 to 8 to the question 4, those within one of it."""
    text = load_text_side(tiny_folder)
    picture = EncodedImage.from_pil(Image.open(io.BytesIO(png())))
    shown = Message("user", (picture, "4?"))
    episodes = [
        replace(
            conversation(text, np.random.default_rng(0), ["4?", picture], [3]),
            messages=(shown, Message.of("assistant", str(k))),
        )
        for k in range(9)
    ]
    for k, one in enumerate(episodes):
        one.turns = (replace(one.turns[0], reward=1 - abs(k - 4) / 4),)
    assert write_kept(tmp_path / "data", episodes, 0.75) == {"train": 2, "test": 1}
    found = open_conversations(str(tmp_path / "data"), "train")
    assert [found[k].messages[1].text for k in range(2)] == ["3", "5"] and found[0].messages[0].images[
        0
    ].png == picture.png
    with pytest.raises(UserInputError, match="1 of 9 episodes"):
        write_kept(tmp_path / "none", episodes, 1.0)


# --- bad rows


USER = {"role": "user", "content": "How many?"}
BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ('{"messages": \n', "not JSON"),
    "a list": ("[1, 2]\n", "a list and not an object"),
    "no messages": ({"text": "hello"}, "`messages` is missing"),
    "no assistant": ({"messages": [USER]}, "no message is the assistant's"),
    "unknown role": ({"messages": [{"role": "human", "content": "?"}, REPLY]}, "the role 'human'; roles are system"),
    "assistant first": ({"messages": [REPLY]}, "begins with the assistant"),
    "two answers": ({"messages": [USER, REPLY, REPLY]}, "messages 1 and 2 are both the assistant's"),
    "late system": ({"messages": [USER, {"role": "system", "content": "x"}, REPLY]}, "only the first may be one"),
    "empty answer": ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 1 is empty"),
    "no content": ({"messages": [USER, {"role": "assistant", "content": None}]}, "neither {type: text, text} nor"),
    "tool calls": ({"messages": [USER, {**REPLY, "tool_calls": [{"id": "1"}]}]}, "message 1 has tool_calls"),
    "tools": (row("fine", tools=[{"type": "function", "function": {"name": "count"}}]), "describe them in the"),
    "a thought of a model without": ({"messages": [USER, {**REPLY, "reasoning_content": "Hm."}]}, "opens no thought"),
    "a thought of the user": (
        {"messages": [{**USER, "reasoning_content": "Hm."}, REPLY]}, "a reasoning_content that is no text of the assistant",
    ),
    "answer with an image": (
        {"messages": [USER, {**REPLY, "content": [{"type": "image", "image": "a.png"}]}]}, "a model answers in text",
    ),
    "a sound": (row([{"type": "audio", "audio": "a.wav"}]), "neither {type: text, text} nor {type: image}"),
    "too few images": (row("<image>and<image>?", ["a.png"]), "2 image placeholders in the messages and 1 images"),
    "too many images": (row("<image>?", ["a.png", "a.png"]), "1 image placeholders in the messages and 2 images"),
    "missing image": (row("<image>?", ["b.png"]), "image 0 is the path 'b.png', and there is no such file"),
    "no image": (row("<image>?", ["a.jsonl"]), "is not a readable image"),
}  # fmt: skip


def job_data(folder: Path, data: str | Path, **settings: Any) -> JobData:
    overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
    return open_job_data(load_sft_config(None, [f"sft.data={data}", *overrides]), load_text_side(folder))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_gets_one_sentence_with_file_and_line(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    content, message = BAD[kind]
    path = write_lines(tmp_path / "a.jsonl", [row("fine"), content, row("fine")])
    with pytest.raises(UserInputError) as error:
        job_data(tiny_folder, path)
    text = str(error.value)
    assert text.startswith(f"{path}, line 2: ") and message in text
    assert text.endswith(".") and "\n" not in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "no file or folder .*nowhere.jsonl"),
        ("a.jsonl@[5:]", "selects none of the 1 rows"),
        ("b.parquet", "lacks the column messages"),
    ],
)
def test_a_bad_source_gets_one_sentence(source: str, message: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [row("fine")])
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(UserInputError, match=message):
        open_conversations(str(tmp_path / source), "train")


# --- what is trained on, in which order


def test_every_epoch_shows_every_conversation_once_in_an_order_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row(f"{k}?") for k in range(10)])
    data = job_data(tiny_folder, path, sft__batch_size=4)
    assert data.steps_per_epoch == 3
    shown = [[one.trajectory_id for one in data.batch(step)] for step in range(6)]
    assert [len(batch) for batch in shown] == [4, 4, 2, 4, 4, 2]
    first, second = functools.reduce(operator.iadd, shown[:3], []), functools.reduce(operator.iadd, shown[3:], [])
    assert sorted(first) == sorted(second) and len(set(first)) == 10 and first != second
    again = job_data(tiny_folder, path, sft__batch_size=4)
    assert [one.trajectory_id for one in again.batch(4)] == shown[4]
    other = job_data(tiny_folder, path, sft__batch_size=4, seed=1)
    assert [one.trajectory_id for one in other.batch(4)] != shown[4]


def test_a_share_is_held_out_and_not_trained_on(tiny_folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row(f"{k}?") for k in range(20)])
    data = job_data(tiny_folder, path, sft__eval_fraction=0.2)
    assert data.held_out is not None
    assert (len(data.train), len(data.held_out)) == (16, 4)
    assert sorted([*data.train.rows, *data.held_out.rows]) == list(range(20))
    assert job_data(tiny_folder, path).held_out is None
    of_train = job_data(tiny_folder, "shapes@[490:]")  # the slice is one of the train split
    assert of_train.held_out is not None and (len(of_train.train), len(of_train.held_out)) == (10, 200)
    named = job_data(tiny_folder, f"{path}@[3:]", sft__eval_data=f"{path}@[:3]")
    assert named.held_out is not None and len(named.held_out) == 3
    with pytest.raises(UserInputError, match="sft.data"):
        job_data(tiny_folder, path, sft__eval_data=f"{path}@[:3]")
    with pytest.raises(UserInputError, match="one of them"):
        job_data(tiny_folder, path, sft__eval_data="x", sft__eval_fraction=0.5)


def test_long_conversations_are_counted_and_left_out_or_cut_after_a_whole_answer(
    tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    long = {"messages": [{"role": "user", "content": "<image>?"}, REPLY] * 20, "images": ["a.png"] * 20}
    path = write_lines(tmp_path / "a.jsonl", [row("short"), long, row("word " * 400)])
    left_out = job_data(tiny_folder, path, sft__max_length=100)
    assert (len(left_out.train), left_out.train.left_out) == (1, 2)
    cut = job_data(tiny_folder, path, sft__max_length=100, sft__too_long="truncate", sft__batch_size=2)
    assert (len(cut.train), cut.train.left_out) == (2, 1)  # nothing is left of one whose question alone is too long
    trajectory = next(one for one in cut.batch(0) if "line 2" in one.trajectory_id).check()
    assert len(trajectory) <= 100 and trajectory.loss_mask[-1]
    text = load_text_side(tiny_folder)
    shown = int((trajectory.token_ids == text.codec.image_token_id).sum())
    assert shown == sum(text.images.count_tokens(image.width, image.height) for image in trajectory.images) > 0
    whole = job_data(tiny_folder, path, sft__max_length=8000, sft__batch_size=3).batch(0)
    full = next(one for one in whole if "line 2" in one.trajectory_id)
    assert np.array_equal(full.token_ids[: len(trajectory)], trajectory.token_ids)
    assert cut.train.tokens[1] == len(trajectory)


def test_a_marker_that_the_assistant_writes_is_text(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Which marker?"}, {"role": "assistant", "content": "It is <image>."}]
    (found,) = open_conversations(str(write_lines(tmp_path / "a.jsonl", [{"messages": messages}])), "train")
    assert found.messages[-1] == Message("assistant", ("It is <image>.",))
