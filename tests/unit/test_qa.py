"""QA-v0: data of one's own in the forms that it comes in, columns, splits, and the sentence that a wrong row gets."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rl_vlm
from rl_vlm.supervised.example import write_example
from rl_vlm.types import UserInputError
from rl_vlm.zoo.qa.data import NAMES
from rl_vlm.zoo.qa.environment import QAEnv
from rl_vlm.zoo.shapes.environment import shapes_item

COUNT = 40
ITEMS = [shapes_item("count", "train", index) for index in range(COUNT)]
OWN: dict[str, Any] = {"columns": {"image": "photo", "question": "ask", "answer": "gold"}}


def png_files(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for index, item in enumerate(ITEMS):
        (folder / f"{index:02d}.png").write_bytes(item.image.png)
    return [f"{index:02d}.png" for index in range(COUNT)]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(photos: list[Any]) -> list[dict[str, Any]]:
    return [
        {"photo": photo, "ask": item.question, "gold": item.answer} for photo, item in zip(photos, ITEMS, strict=True)
    ]


def parquet(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(rows([[item.image.png] for item in ITEMS])), folder / "own.parquet")
    return str(folder / "own.parquet")


def json_lines(folder: Path) -> str:
    return write_lines(folder / "own.jsonl", rows([f"pictures/{name}" for name in png_files(folder / "pictures")]))


def in_base64(folder: Path) -> str:
    return write_lines(folder / "own.jsonl", rows([base64.b64encode(item.image.png).decode() for item in ITEMS]))


def json_array(folder: Path) -> str:
    """With the paths that Windows writes."""
    names = [rf"pictures\{name}" for name in png_files(folder / "pictures")]
    (folder / "own.json").write_text(json.dumps(rows(names), indent=1, ensure_ascii=False))
    return str(folder / "own.json")


def addresses_compressed(folder: Path) -> str:
    lines = rows([f"file://{folder}/pictures/{name}" for name in png_files(folder / "pictures")])
    (folder / "own.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return str(folder / "own.jsonl.gz")


def tab_separated(folder: Path) -> str:
    with (folder / "own.tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("photo", "ask", "gold"), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows([base64.b64encode(item.image.png).decode() for item in ITEMS]))
    return str(folder / "own.tsv")


def saved_arrow(folder: Path) -> str:
    """As `datasets.save_to_disk` writes two shards."""
    (folder / "own").mkdir()
    parts = [rows([[item.image.png] for item in ITEMS])[start : start + 25] for start in (0, 25)]
    for number, part in enumerate(map(pa.Table.from_pylist, parts)):
        with pa.ipc.new_stream(str(folder / f"own/data-{number}.arrow"), part.schema) as writer:
            writer.write_table(part, max_chunksize=7)
    state = {"_data_files": [{"filename": f"data-{number}.arrow"} for number in (0, 1)]}
    (folder / "own/state.json").write_text(json.dumps(state))
    return str(folder / "own")


def linked_pictures(folder: Path) -> str:
    names = png_files(folder / "elsewhere")
    (folder / "own").mkdir()
    (folder / "own/pictures").symlink_to(folder / "elsewhere")
    return write_lines(folder / "own/train.jsonl", rows([f"pictures/{name}" for name in names]))


def image_folder(folder: Path) -> str:
    names = png_files(folder / "own")
    write_lines(folder / "own/metadata.jsonl", [{**row, "file_name": row.pop("photo")} for row in rows(names)])
    return str(folder / "own")


def image_folder_csv(folder: Path) -> str:
    names = png_files(folder / "own/train")
    with (folder / "own/train/metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows(
            [
                ["file_name", "ask", "gold"],
                *([name, row["ask"], row["gold"]] for name, row in zip(names, rows(names), strict=True)),
            ]
        )
    return str(folder / "own")


def class_folders(folder: Path) -> str:
    for index, item in enumerate(ITEMS):
        place = folder / "own" / item.answer
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{index:02d}.png").write_bytes(item.image.png)
        (place / f"._{index:02d}.png").write_bytes(b"AppleDouble")
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (folder / "own" / name).mkdir()
        (folder / "own" / name / "0.png").write_bytes(ITEMS[0].image.png)
    return str(folder / "own")


FORMS = {
    "parquet": (parquet, OWN), "paths": (json_lines, OWN), "base64": (in_base64, OWN),
    "JSON array": (json_array, OWN), "compressed, file:// addresses": (addresses_compressed, OWN),
    "tab-separated": (tab_separated, OWN), "saved by datasets": (saved_arrow, OWN), "linked": (linked_pictures, OWN),
    "image folder": (image_folder, {"columns": {"question": "ask", "answer": "gold"}}),
    "image folder with CSV": (image_folder_csv, {"columns": {"question": "ask", "answer": "gold"}}),
    "folders named by class": (class_folders, {"question": "How many shapes?"}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forty_pictures_of_ones_own_are_asked_whatever_they_are_kept_in(form: str, tmp_path: Path) -> None:
    write, kwargs = FORMS[form]
    env = rl_vlm.make("QA-v0", data=write(tmp_path), **kwargs)
    assert env.num_items("train") == COUNT
    env.validate("train")  # type: ignore[attr-defined]
    known = {item.image.to_pil().tobytes(): item.answer for item in ITEMS}
    for index in range(COUNT):
        observation, info = env.reset(options={"index": index})
        (message,) = observation.messages
        (image,) = message.images
        assert message.text == "How many shapes?" and info["truth"] == known.pop(image.to_pil().tobytes())
        shown, reward, terminated, _, after = env.step(f"<answer>{info['truth']}</answer>")
        assert (shown.messages, reward, terminated, after["correct"]) == ((), 1.0, True, True)
    assert not known


def only(tmp_path: Path, row: dict[str, Any], **kwargs: Any) -> QAEnv:
    (tmp_path / "a.png").write_bytes(ITEMS[0].image.png)
    return QAEnv(write_lines(tmp_path / "own.jsonl", [row]), **kwargs)


@pytest.mark.parametrize("question", NAMES["question"])
@pytest.mark.parametrize("answer", NAMES["answer"])
def test_common_names_of_columns_are_known(question: str, answer: str, tmp_path: Path) -> None:
    env = only(tmp_path, {"Image": "a.png", question: "Red?", answer: "yes", "level": 3})
    _, info = env.reset(options={"index": 0})
    assert (info["prompt"], info["truth"], info["columns"]["level"]) == ("Red?", "yes", 3)
    assert info["columns"].keys() >= {"question", "answer", answer} and "Image" not in info["columns"]
    assert info["image_columns"] == {"Image": 0}


def test_the_question_comes_with_images_where_its_marks_are_and_a_system_message(tmp_path: Path) -> None:
    env = only(
        tmp_path,
        {"image": ["a.png", "a.png"], "question": "Is <image> as <image>?", "answer": True},
        system="Be brief.",
    )
    (system, user), info = env.reset(options={"index": 0})[0].messages, env.reset(options={"index": 0})[1]
    kinds = [type(part).__name__ for part in user.parts]
    assert system.text == "Be brief." and kinds == ["str", "EncodedImage", "str", "EncodedImage", "str"]
    assert info["truth"] == "true" and info["image_columns"] == {"image": [0, 1]}


def test_chat_messages_are_a_prompt_as_trl_has_it(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
    ]
    env = only(tmp_path, {"image": "a.png", "prompt": prompt, "solution": "2"})
    observation, info = env.reset(options={"index": 0})
    assert [message.role for message in observation.messages] == ["system", "user"]
    assert info["prompt"][1] == prompt[1] and info["columns"] == {"solution": "2", "answer": "2"}


def test_plain_questions_are_shown_to_functions_as_messages_where_they_want_these(tmp_path: Path) -> None:
    env = only(tmp_path, {"image": "a.png", "question": "How many?", "answer": 2}, conversational=True)
    shown = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    assert env.reset(options={"index": 0})[1]["prompt"] == [{"role": "user", "content": shown}]


def test_conversations_of_sft_are_asked_and_their_last_message_is_the_answer(tmp_path: Path) -> None:
    write_example(tmp_path / "data")
    env = QAEnv(str(tmp_path / "data"))
    assert (env.num_items("train"), env.num_items("test")) == (500, 200)
    _, info = env.reset(options={"index": 0})
    assert env.step(f"Answer: {info['truth']}")[1] == 1.0


def test_without_answers_nothing_is_right_or_wrong(tmp_path: Path) -> None:
    env = only(tmp_path, {"image": "a.png", "question": "Describe it."}, columns={"answer": None})
    _, info = env.reset(options={"index": 0})
    _, reward, _, _, after = env.step("A dot.")
    assert reward == 0.0 and not {"correct", "truth"} & {*info, *after} and after["answer"] == "A dot."


@pytest.mark.parametrize(
    ("row", "kwargs", "sentence"),
    [
        ({"pic": "a.png", "question": "?", "answer": 1}, {}, r"no column has a usual name of the image \(.*; the columns are pic, question, answer. Name one in env.kwargs.columns, such as \{image: COLUMN\}"),
        ({"image": "a.png", "q": "?", "answer": 1}, {}, "usual name of the question"),
        ({"image": "a.png", "question": "?", "a": 1}, {}, "usual name of the answer"),
        ({"image": "a.png", "q": "?", "a": 1}, {"columns": {"question": "ask"}}, "line 1: env.kwargs.columns names 'ask' for the question, and the columns are image, q, a"),
        ({"image": "a.png", "question": "?", "answer": None}, {}, r"line 1: the answer \(answer\) is empty"),
        ({"image": "a.png", "question": "?", "answer": {"a": 1}}, {}, "line 1: the answer \"{'a': 1}\" is neither a text, a number"),
        ({"image": "a.png", "question": [], "answer": 1}, {}, r"line 1: the question \(question\) is empty"),
        ({"image": "a.png", "question": "?", "answer": 1, **{f"long{k}": "x" * 40_000 for k in range(2)}}, {}, "more than 65536 characters"),
    ],
)  # fmt: skip
def test_a_wrong_row_or_column_gets_one_sentence(
    row: dict[str, Any], kwargs: Any, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(ITEMS[0].image.png)
    env = QAEnv(write_lines(tmp_path / "own.jsonl", [row]), **kwargs)
    with pytest.raises(UserInputError, match=sentence):
        env.validate("train")


# --- Splits


def places(env: QAEnv, split: Any) -> list[str]:
    return [
        env.reset(options={"index": index, "split": split})[1]["where"] for index in range(env.num_items(split) or 0)
    ]


def test_a_share_of_the_rows_is_the_test_split(tmp_path: Path) -> None:
    env = QAEnv(parquet(tmp_path), test_share=0.25, **OWN)
    train, test = places(env, "train"), places(env, "test")
    assert (len(train), len(test)) == (30, 10) and len({*train, *test}) == COUNT
    assert places(QAEnv(parquet(tmp_path), test_share=0.25, **OWN), "test") == test  # in every process the same


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_column_says_which_split_a_row_is_of(form: str, tmp_path: Path) -> None:
    marked = [
        {**row, "fold": "Validation" if index % 4 == 0 else "train"}
        for index, row in enumerate(rows(png_files(tmp_path)))
    ]
    data = write_lines(tmp_path / "own.jsonl", marked)
    if form == "parquet":
        data = str(tmp_path / "own.parquet")
        pq.write_table(pa.Table.from_pylist(marked), data)
    env = QAEnv(data, split_column="fold", **OWN)
    assert (env.num_items("train"), env.num_items("test")) == (30, 10)
    assert env.reset(options={"index": 1, "split": "test"})[1]["truth"] == ITEMS[4].answer
    for column, sentence in (("ask", "'how many shapes\\?'; it must be one of train"), ("none", "none")):
        with pytest.raises(UserInputError, match=sentence):
            QAEnv(data, split_column=column, **OWN).num_items("train")


def test_files_of_their_own_are_splits_and_two_ways_to_split_are_one_too_many(tmp_path: Path) -> None:
    data = parquet(tmp_path)
    parts = {"train": f"{data}@[10:]", "test": f"{data}@[:10]"}
    env = QAEnv(parts, **OWN)
    assert (env.num_items("train"), env.num_items("test")) == (30, 10)
    for kwargs in ({"data": parts, "test_share": 0.1}, {"data": data, "test_share": 0.1, "split_column": "ask"}):
        with pytest.raises(UserInputError, match="exclude each other"):
            QAEnv(**kwargs, **OWN)
    with pytest.raises(UserInputError, match="none of the 40 rows"):
        QAEnv(data, test_share=0.999, **OWN).num_items("test")
    with pytest.raises(UserInputError, match="names no test split"):
        QAEnv(data, **OWN).num_items("test")


def test_a_folder_of_images_by_split_is_not_taken_for_one_by_class(tmp_path: Path) -> None:
    for split in ("train", "test"):
        png_files(tmp_path / "own" / split)
    with pytest.raises(UserInputError, match="neither train.parquet nor"):
        QAEnv(str(tmp_path / "own"), question="?").num_items("train")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("image,question,answer\na.png,?,1,2\n")
    with pytest.raises(UserInputError, match=r"own.csv is not a readable CSV file \(.*Expected 3 columns, got 4"):
        QAEnv(str(tmp_path / "own.csv")).reset(options={"index": 0})
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserInputError, match="bad.csv is not a readable CSV file"):
        QAEnv(str(tmp_path / "bad.csv")).num_items("train")
