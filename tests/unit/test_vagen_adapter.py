"""VAGEN's environments, unchanged: coroutines, images at their placeholders, the system prompt, seeds as items."""

import time
from pathlib import Path

import pytest

import rl_vlm
from rl_vlm.envs.errors import EnvError, EnvTimeoutError, check_reset, check_step
from rl_vlm.envs.foreign.vagen import to_message
from rl_vlm.types import UserInputError, judged_correct

PUSH = str(Path(__file__).parents[1] / "fixtures" / "envs" / "vagen_env.py")


@pytest.fixture(autouse=True)
def clean_imports(forgotten):
    forgotten("vagen")


@pytest.fixture
def env():
    made = rl_vlm.make(PUSH, length=3, num_train=10, num_test=5)
    yield made
    made.close()


def test_the_conversation_opens_with_the_system_prompt_and_the_images_at_their_places(env):
    observation, info = check_reset(env.reset(options={"index": 2, "split": "train"}))
    system, user = observation.messages
    assert (system.role, system.text) == ("system", "Answer with <answer>right</answer>.")
    first, shade, between, goal, end = user.parts
    assert (first, between, end) == ("You see ", " and the goal ", ".")
    assert shade.getpixel((0, 0)) == (20, 20, 20) and goal.getpixel((0, 0)) == (255, 255, 255)
    assert info["seed_given"] == 2


def test_an_episode_is_played_to_its_end(env):
    env.reset(options={"index": 1, "split": "train"})
    steps = [check_step(env.step(text)) for text in ("wait", "right", "right")]
    assert [step[1] for step in steps] == [0.0, 0.0, 1.0]
    assert [step[2] for step in steps] == [False, False, True] and steps[-1][4]["success"]
    assert steps[0][0].messages[0].parts[0] == "After your move "
    # Whatever the rewards add up to.
    assert [judged_correct(step[4], reward=5.0) for step in steps] == [False, False, True]


def test_the_splits_have_their_own_seeds(env):
    seeds = {
        split: {env.reset(options={"index": i, "split": split})[1]["seed"] for i in range(env.num_items(split))}
        for split in ("train", "test")
    }
    assert (len(seeds["train"]), len(seeds["test"])) == (10, 5) and not seeds["train"] & seeds["test"]


@pytest.mark.slow
def test_a_call_that_hangs_ends_at_its_deadline():
    env = rl_vlm.make(PUSH, fault="hang", timeout_s=2)
    env.reset(options={"index": 0})
    started = time.monotonic()
    with pytest.raises(EnvTimeoutError):
        env.step("right")
    env.close()
    assert time.monotonic() - started < 30


def test_wrong_arguments_and_images_are_named():
    with pytest.raises(UserInputError, match="env.kwargs"):
        rl_vlm.make(PUSH, colour="red")
    env = rl_vlm.make(PUSH, fault="images")
    with pytest.raises(EnvError, match="more placeholders"):
        env.reset(options={"index": 0})
    env.close()
    with pytest.raises(EnvError, match="without a placeholder"):
        to_message({"obs_str": "x", "multi_modal_input": {"<image>": [b"1"]}})
    with pytest.raises(EnvError, match="text obs_str"):
        to_message("x")
