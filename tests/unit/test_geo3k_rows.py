"""Geo3k: its rows, its arguments, and gymnasium's own checks."""

import warnings
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env

import rl_vlm
from rl_vlm.envs.data import BadRowError, open_dataset
from rl_vlm.envs.errors import EnvError, check_step
from rl_vlm.types import UserInputError
from rl_vlm.zoo.geo3k.environment import Geo3kEnv

GEO3K = str(Path(__file__).parents[1] / "fixtures" / "geo3k")


def test_every_row_of_the_fixture_is_paid_for_its_own_answer():
    env = Geo3kEnv(data=GEO3K)
    for split, size in (("train", 8), ("test", 4)):
        assert env.num_items(split) == size
        assert env.validate(split) == size
        table = open_dataset(GEO3K, split)
        for index in range(size):
            env.reset(options={"index": index, "split": split})
            assert check_step(env.step(rf"\boxed{{{table[index].answer}}}"))[1] == 1.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"data": GEO3K, "max_turns": 0}, "env.kwargs.max_turns is 0"),
        ({"data": GEO3K, "max_turns": True}, "env.kwargs.max_turns must be an integer, not True"),
        ({"data": GEO3K, "image_size": 0}, "env.kwargs.image_size is 0"),
        ({"data": GEO3K, "square": True}, "env.kwargs.image_size is None"),
        ({"data": GEO3K, "prompt": "long"}, "must be one of auto, full, brief, none"),
        ({"data": GEO3K, "turns": 3}, "unexpected keyword argument 'turns'"),
    ],
)
def test_a_wrong_argument_is_named(kwargs, message):
    with pytest.raises(UserInputError, match=message):
        rl_vlm.make("Geo3k-v0", **kwargs)


@pytest.mark.parametrize("options", [{"index": 8}, {"index": -1}, {"index": 4, "split": "test"}, {"split": "dev"}])
def test_a_question_that_does_not_exist_is_refused(options):
    with pytest.raises(UserInputError, match="does not exist|no split"):
        Geo3kEnv(data=GEO3K).reset(options=options)


def test_a_bad_row_is_an_error_at_reset(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"problem": ["?"], "answer": ["5"], "images": [[b"junk"]]}), tmp_path / "train.parquet")
    env = Geo3kEnv(data=str(tmp_path))
    with pytest.raises(BadRowError, match="row 0: image 0 is not a readable image"):
        env.reset(options={"index": 0})
    with pytest.raises(EnvError, match="call reset"):
        env.step("x")


def test_the_seed_alone_picks_a_question():
    env = Geo3kEnv(data=GEO3K)
    picks = [env.reset(seed=seed)[1]["index"] for seed in (1, 1, 2, 3, 4, 5)]
    assert picks[0] == picks[1]
    assert len(set(picks)) > 1


def test_it_passes_gymnasiums_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checker wishes for a spec and array spaces; its errors count
        check_env(Geo3kEnv(data=GEO3K), skip_render_check=True)
