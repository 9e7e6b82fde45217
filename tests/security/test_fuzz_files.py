"""Random input for every reader of files and replies: it gives a value or an error of the user's, within bounds.

RL_VLM_FUZZ_SECONDS is the time for each target; by default each gets some dozens of inputs.
"""

import io
import json
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz_targets import CONFIG, FRAME, IMAGES, TARGETS, WORDS, YAML, check_label
from fuzzing import SECONDS, damaged, fuzz
from hypothesis import strategies as st

from rl_vlm import frames
from rl_vlm.envs import isolation
from rl_vlm.envs.questions import QUESTIONS
from rl_vlm.envs.rows import file_rows
from rl_vlm.types import UserInputError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(600, 3 * SECONDS))]


def test_images():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about damaged metadata
        assert fuzz(damaged(IMAGES), TARGETS["images"].check) > 10


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
            found = file_rows([file], QUESTIONS.columns)
            for index in range(min(len(found), 30)):
                assert set(found.row(index)) == {"problem", "answer", "images"}
        except UserInputError:
            pass

    assert fuzz(damaged(files), check) > 10


def test_label_answers():
    answers = st.lists(st.sampled_from([*WORDS, "\ud800"]), max_size=40).map(" ".join) | st.text(max_size=300)
    assert fuzz(answers, check_label) > 10


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "parts", "width", "height", "blobs", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def test_wire():
    def values(value):
        try:
            isolation.unpack_observation(value, [IMAGES[0]] * 3)
        except frames.FrameError:
            pass

    assert fuzz(damaged([FRAME]), TARGETS["frames"].check, 0.5) > 10
    assert fuzz(JSON, values, 0.5) > 10


def test_adapters():
    config, tensors = (TARGETS[f"adapter_{part}"] for part in ("config", "tensors"))
    assert fuzz(damaged(config.seeds), config.check, 0.3) > 10
    assert fuzz(damaged(tensors.seeds), tensors.check, 0.3) > 10
    odd = JSON.map(lambda value: json.dumps({**CONFIG, "r": value, "lora_alpha": value}).encode())
    assert fuzz(odd, config.check, 0.4) > 10


def test_yaml():
    assert fuzz(damaged(YAML), TARGETS["yaml"].check) > 10
