"""Random input for every reader of files and replies: it gives a value or an error of the user's, within bounds.

RL_VLM_FUZZ_SECONDS is the time for each target; by default each gets some dozens of inputs.
"""

import io
import json
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from fuzzing import SECONDS, damaged, fuzz
from hypothesis import strategies as st
from image_corpus import chunk, encoded, jpeg_in_tiff, png, scan_bomb, sequential_bomb
from safetensors.torch import save
from torch import zeros

from rl_vlm.config.yaml_text import load_yaml
from rl_vlm.envs import images, wire
from rl_vlm.envs.rows import ParquetRows
from rl_vlm.labelling.answer_text import strip_thoughts
from rl_vlm.labelling.parsing import parse_label, parse_score
from rl_vlm.labelling.query_log import text_cell
from rl_vlm.models.adapter import check_adapter
from rl_vlm.safe_text import printable, safe
from rl_vlm.types import EncodedImage, UserInputError

pytestmark = pytest.mark.timeout(max(600, 3 * SECONDS))


IMAGES = [
    encoded("PNG", 24),
    encoded("PNG", 24, "P"),
    encoded("JPEG", 24),
    encoded("JPEG", 24, progressive=True),
    encoded("WEBP", 24),
    encoded("GIF", 24, "P"),
    encoded("BMP", 24),
    encoded("TIFF", 24),
    encoded("TIFF", 24, compression="tiff_lzw"),
    scan_bomb(24, 20),
    sequential_bomb(24, 20),
    png(8, 8, bytes(72), chunk(b"eXIf", b"II*\0" + bytes(40))),
]


def test_images():
    def check(data):
        try:
            picture = images.decode(data, max_pixels=10**6)
            assert picture.width * picture.height <= 10**6
        except images.ImageError as error:
            assert len(str(error)) < 700
        try:
            EncodedImage("0", data, 24, 24).to_pil()
        except UserInputError:
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about damaged metadata
        assert fuzz(damaged(IMAGES), check) > 10


def test_parquet(tmp_path):
    rows = [{"problem": f"p{n}", "answer": str(n), "images": [{"bytes": IMAGES[0], "path": None}]} for n in range(20)]
    files = []
    for options in ({}, {"compression": "zstd"}, {"use_dictionary": False, "row_group_size": 7}):
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), out, **options)
        files.append(out.getvalue())
    file = tmp_path / "train.parquet"

    def check(data):
        file.write_bytes(data)
        try:
            found = ParquetRows([file])
            for index in range(min(len(found), 30)):
                assert set(found.row(index)) == {"problem", "answer", "images"}
        except UserInputError:
            pass

    assert fuzz(damaged(files), check) > 10


WORDS = [
    "image 1",
    "image 2",
    "is",
    "better",
    "not",
    "both",
    "0",
    "1",
    "-1",
    "<think>",
    "</think>",
    "\n",
    "**",
    "(",
    ")",
]
WORDS += [
    "because",
    "the first",
    "left",
    "however,",
    "answer:",
    "{",
    "}",
    ".",
    "?",
    "’",
    "—",
    "１",
    "\x00",
    "\ud800",
    "so",
]


def test_label_answers():
    def check(text):
        for goal in ("", "open the drawer"):
            assert parse_label(text, goal) in (0, 1, -1, None)
        score = parse_score(text)
        assert score is None or -1 <= score <= 1
        assert len(strip_thoughts(text)) <= len(text) + 1
        assert printable(text_cell(text)) == text_cell(text)
        assert safe(safe(text)) == safe(text)

    answers = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join) | st.text(max_size=300)
    assert fuzz(answers, check) > 10


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "parts", "width", "height", "blobs", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_wire():
    messages = [{"role": "user", "parts": ["hello", {"width": 24, "height": 24}]}]
    frame = wire.pack_frame({"messages": messages, "info": {}}, [IMAGES[0]])

    def check(data):
        try:
            content, blobs = wire.unpack_frame(data)
            shown = wire.unpack_observation(content.get("messages"), blobs)
            assert all(part.width > 0 for one in shown.messages for part in one.parts if not isinstance(part, str))
        except wire.FrameError:
            pass

    def values(value):
        try:
            wire.unpack_observation(value, [IMAGES[0]] * 3)
        except wire.FrameError:
            pass

    assert fuzz(damaged([frame]), check, 0.5) > 10
    assert fuzz(JSON, values, 0.5) > 10


def test_adapters():
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
    tensors = save({"base_model.model.a.lora_A.weight": zeros(4, 8)})

    def check(files):
        try:
            check_adapter("x", files[0].decode("utf-8", "replace"), files[1])
        except UserInputError as error:
            assert len(str(error)) < 700

    pair = st.tuples(damaged([json.dumps(config).encode()]), damaged([tensors]))
    assert fuzz(pair, check, 0.5) > 10
    odd = JSON.map(lambda v: json.dumps({**config, "r": v, "lora_alpha": v}).encode())
    assert fuzz(st.tuples(odd, st.just(tensors)), check, 0.5) > 10


def test_yaml():
    texts = damaged(
        [b"a: &x {b: [1, 2.5, null]}\nc: *x\nd: '2020-01-01'\ne: 2020-01-01\n<<: *x\n", b"- [a, {b: c}]\n- |\n  text\n"]
    )

    def check(data):
        try:
            load_yaml(data.decode("utf-8", "replace"))
        except yaml.YAMLError:
            pass

    assert fuzz(texts, check) > 10


def test_costly_images_in_a_process():
    assert images.decode(jpeg_in_tiff(24)).width == 24
