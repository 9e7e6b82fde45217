"""Control-v0: words become actions, frames are shown, wrong words are answered; on MiniGrid, CartPole and MetaWorld."""

import numpy as np
import pytest

import rl_vlm
from rl_vlm.control_envs.metaworld_cameras import import_mujoco
from rl_vlm.envs.errors import EnvError, check_reset, check_step
from rl_vlm.zoo.control.words import read_word

EMPTY = {
    "env": "MiniGrid-Empty-5x5-v0", "actions": ["left", "right", "forward"], "highlight": False, "tile_size": 8,
    "disjoint": False,
}  # fmt: skip


def minigrid(**kwargs):
    return rl_vlm.make("Control-v0", **{**EMPTY, **kwargs})


def cartpole(**kwargs):
    return rl_vlm.make("Control-v0", env="CartPole-v1", actions=["left", "right"], image_size=64, **kwargs)


def opened(env, index=0, split="train"):
    return check_reset(env.reset(options={"index": index, "split": split}))


def test_minigrid_is_solved_by_words_over_several_turns():
    env = minigrid()
    observation, _ = opened(env)
    (message,) = observation.messages
    assert message.text == (
        "Get to the green goal square. In each of at most 32 turns end your answer with one of these words: left, right, forward."
    )
    assert np.asarray(message.images[0].to_pil()).shape == (40, 40, 3)
    walk = ["forward", "I go FORWARD.", "right", "forward", "<think>left?</think>forward"]
    steps = [check_step(env.step(text)) for text in walk]
    assert [step[2] for step in steps] == [False] * 4 + [True]
    # MiniGrid pays 1 - 0.9 · steps / max_steps, and a grid of 5 has 4 · 5² of them.
    assert steps[-1][1] == pytest.approx(1 - 0.9 * 5 / 100)
    assert steps[-1][4] == {
        "success": True, "correct": True, "turn": 5, "frames": 5, "well_formed": True, "invalid_actions": 0,
    }  # fmt: skip
    assert steps[0][0].messages[0].text == "Which action: left, right or forward?"
    assert not np.array_equal(
        np.asarray(steps[0][0].messages[0].images[0].to_pil()), np.asarray(message.images[0].to_pil())
    )


def test_a_turn_without_a_word_is_answered_moves_nothing_and_is_counted():
    env = minigrid()
    before = np.asarray(opened(env)[0].messages[0].images[0].to_pil())
    for number, text in enumerate(("", "forward or so", "pickup"), 1):
        observation, reward, terminated, truncated, info = check_step(env.step(text))
        assert observation.messages[0].text == "No action was found. End with left, right or forward."
        assert np.array_equal(np.asarray(observation.messages[0].images[0].to_pil()), before)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert (info["invalid_actions"], info["frames"], info["well_formed"]) == (number, 0, False)


def test_success_pays_one_and_turns_are_limited():
    env = minigrid(reward="success", max_turns=5)
    opened(env)
    rewards = [check_step(env.step(word))[1] for word in ("forward", "forward", "right", "forward", "forward")]
    assert rewards == [0, 0, 0, 0, 1]
    opened(env)
    ends = [check_step(env.step("left"))[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]


def test_an_end_that_pays_after_steps_that_paid_is_no_success():
    """A pole that falls is paid for each step, the last one too."""
    env = cartpole(max_turns=64)
    opened(env)
    ends = False
    while not ends:
        _, reward, ends, _, info = check_step(env.step("left"))
        assert (reward, info["success"], info["correct"]) == (1.0, False, False)
    env.close()
    env = cartpole(max_turns=64, reward="success")
    opened(env)
    with pytest.raises(EnvError, match="reward=success"):
        for _ in range(64):
            assert check_step(env.step("left"))[1] == 0.0
    env.close()


def test_actions_are_repeated_and_the_last_frames_are_shown():
    env = cartpole(frame_skip=4, history=3)
    observation, _ = opened(env)
    assert len(observation.messages[0].images) == 1
    first = check_step(env.step("right"))
    assert len(first[0].messages[0].images) == 3 and first[1] == 4.0 and first[4]["frames"] == 4
    assert all(np.asarray(image.to_pil()).shape == (64, 64, 3) for image in first[0].messages[0].images)
    by_hand = cartpole()
    opened(by_hand)
    frames = [np.asarray(by_hand.step("right")[0].messages[0].images[0].to_pil()) for _ in range(4)]
    for shown, single in zip(first[0].messages[0].images, frames[1:], strict=True):
        assert np.array_equal(np.asarray(shown.to_pil()), single)
    env.close(), by_hand.close()


def test_an_environment_with_one_start_has_one_split():
    with pytest.raises(EnvError, match="disjoint=false"):
        for split in ("train", "test"):
            opened(minigrid(disjoint=True), 0, split)


@pytest.mark.slow
def test_metaworld_reach_is_played_with_named_moves():
    import_mujoco()  # chooses how to draw before anything else imports it
    env = rl_vlm.make(
        "Control-v0", env="metaworld/reach-v3", task="Move the hand to the red ball", frame_skip=10, image_size=32,
        max_turns=40, reward="success", camera="corner2",
    )  # fmt: skip
    observation, _ = opened(env, 1)
    assert tuple(env.words)[:6] == ("left", "right", "forward", "back", "up", "down")
    assert observation.messages[0].text.startswith("Move the hand to the red ball. In each")
    inner = env._inner._inner
    done = False
    for _ in range(40):
        gap = inner._target_pos - inner.tcp_center
        axis = int(np.argmax(np.abs(gap)))
        word = (("left", "right"), ("back", "forward"), ("down", "up"))[axis][int(gap[axis] > 0)]
        _, reward, done, truncated, info = check_step(env.step(word))
        if done or truncated:
            break
    assert done and reward == 1.0 and info["success"]
    env.close()


WORDS = {"left": 0, "turn left": 1, "stop": 2}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("left", "left"), ("LEFT!", "left"), ("I will turn left.", "turn left"), ("<answer>stop</answer>", "stop"),
        ("**Stop**", "stop"), ("stop or left or", None), ("unstop", None), ("<think>stop</think>", None), ("", None),
        ("left" * 1000, None),
    ],
)  # fmt: skip
def test_the_last_word_counts(text, word):
    assert read_word(text, WORDS) == word
