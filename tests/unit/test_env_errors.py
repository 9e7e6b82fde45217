"""The check of what an environment returns."""

import numpy as np
import pytest
from PIL import Image

from rl_vlm.envs.errors import EnvError, check_reset, check_step, reward_parts
from rl_vlm.types import Message, Observation

GOOD = Observation.user("x")


def test_a_good_step_is_returned_with_plain_types():
    result = check_step((GOOD, np.float32(0.5), np.bool_(True), False, {}))
    assert result == (GOOD, 0.5, True, False, {})
    assert type(result[1]) is float and type(result[2]) is bool
    assert check_step((Observation(), 1, True, False, {}))[1] == 1.0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "not None"),
        ([GOOD, 1.0, False, False, {}], "not a value of type list"),
        ((GOOD, 1.0, False, {}), "not a tuple of 4"),
        (("x", 1.0, False, False, {}), "an Observation, not a value of type str"),
        ((GOOD, "1", False, False, {}), "a number as reward"),
        ((GOOD, None, False, False, {}), "a number as reward, not None"),
        ((GOOD, float("inf"), False, False, {}), "the reward inf"),
        ((GOOD, 10**400, False, False, {}), "beyond the range"),
        ((GOOD, 1.0, 0, False, {}), "a bool as terminated"),
        ((GOOD, 1.0, False, None, {}), "a bool as truncated"),
        ((GOOD, 1.0, False, False, None), "a dict as info"),
        ((Observation(), 1.0, False, False, {}), "although the episode goes on"),
        ((Observation(("x",)), 1.0, False, False, {}), "message 0"),
        ((Observation([Message.of("user", "x")]), 1.0, False, False, {}), "not a tuple"),
        ((Observation.user(5), 1.0, False, False, {}), "parts are text or images"),
        ((Observation.user("\ud800"), 1.0, False, False, {}), "lone surrogate"),
        ((Observation.user(Image.new("RGB", (0, 5))), 1.0, False, False, {}), "is empty"),
        ((Observation((Message.of("narrator", "x"),)), 1.0, False, False, {}), "role 'narrator'"),
    ],
)
def test_a_nonsense_step_says_what_is_wrong(result, message):
    with pytest.raises(EnvError, match=message):
        check_step(result)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (GOOD, r"\(observation, info\)"),
        ((GOOD, {}, 0), "a tuple of 3"),
        ((Observation(), {}), "without a message"),
        ((GOOD, []), "a dict as info"),
    ],
)
def test_a_nonsense_reset_says_what_is_wrong(result, message):
    with pytest.raises(EnvError, match=message):
        check_reset(result)


def test_a_part_does_not_take_the_place_of_the_reward_itself():
    assert reward_parts({"reward_parts": {"format": 0.5}}) == (("format", 0.5),)
    with pytest.raises(EnvError, match="part 'env'"):
        reward_parts({"reward_parts": {"env": 5.0}})
