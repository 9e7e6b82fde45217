"""Geo3k: its rows, its arguments, and gymnasium's own checks."""

from pathlib import Path

import pytest

from rl_vlm.envs.data import QUESTIONS, BadRowError, open_table
from rl_vlm.envs.errors import check_step
from rl_vlm.types import UserInputError
from rl_vlm.zoo.geo3k.environment import Geo3kEnv

GEO3K = str(Path(__file__).parents[1] / "fixtures" / "geo3k")


def test_every_row_of_the_fixture_is_paid_for_its_own_answer():
    env = Geo3kEnv(data=GEO3K)
    for split, size in (("train", 8), ("test", 4)):
        assert env.num_items(split) == size
        assert env.validate(split) == size
        table = open_table(QUESTIONS, GEO3K, split)
        for index in range(size):
            env.reset(options={"index": index, "split": split})
            assert check_step(env.step(rf"\boxed{{{table[index].answer}}}"))[1] == 1.0


def test_a_bad_row_is_an_error_at_reset(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"problem": ["?"], "answer": ["5"], "images": [[b"junk"]]}), tmp_path / "train.parquet")
    env = Geo3kEnv(data=str(tmp_path))
    with pytest.raises(BadRowError):
        env.reset(options={"index": 0})
    with pytest.raises(UserInputError, match="call reset"):
        env.step("x")
