"""VAGEN's environments, unchanged: coroutines, images at their placeholders, the system prompt, seeds as items."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

import rl_vlm
from rl_vlm.envs.errors import EnvError, EnvTimeoutError, check_reset, check_step
from rl_vlm.envs.foreign.vagen import to_message
from rl_vlm.types import RLVLMError, UserInputError, judged_correct

PUSH = str(Path(__file__).parents[1] / "fixtures" / "envs" / "vagen_env.py")


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vagen"]:
        del sys.modules[name]


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
    with pytest.raises(RLVLMError, match="call reset"):
        env.step("right")


def test_the_splits_have_their_own_seeds(env):
    seeds = {
        split: {env.reset(options={"index": i, "split": split})[1]["seed"] for i in range(env.num_items(split))}
        for split in ("train", "test")
    }
    assert (len(seeds["train"]), len(seeds["test"])) == (10, 5) and not seeds["train"] & seeds["test"]


def test_it_works_inside_a_running_event_loop(env):
    async def play():
        env.reset(options={"index": 0, "split": "train"})
        return env.step("right")

    assert asyncio.run(play())[4]["turn"] == 1


def test_turns_are_limited_and_text_alone_is_fine():
    env = rl_vlm.make(f"{PUSH}:PushEnv", render_mode="text", max_turns=1)
    assert env.reset(options={"index": 1})[0].messages[1].parts == ("You see 1",)
    assert env.step("wait")[2:4] == (False, True)
    env.close()
    env.close()


def test_a_call_that_hangs_ends_at_its_deadline():
    env = rl_vlm.make(PUSH, fault="hang", timeout_s=0.2)
    env.reset(options={"index": 0})
    started = time.monotonic()
    with pytest.raises(EnvTimeoutError, match=r"PushEnv: step\(\) took longer than 0.2 s"):
        env.step("right")
    env.close()
    assert time.monotonic() - started < 30


def test_wrong_arguments_and_images_are_named():
    with pytest.raises(UserInputError, match="PushEnv cannot be made with these env.kwargs .*colour"):
        rl_vlm.make(PUSH, colour="red")
    env = rl_vlm.make(PUSH, fault="images")
    with pytest.raises(EnvError, match="more placeholders <image> than images"):
        env.reset(options={"index": 0})
    env.close()
    with pytest.raises(EnvError, match="images without a placeholder"):
        to_message({"obs_str": "x", "multi_modal_input": {"<image>": [b"1"]}})
    with pytest.raises(EnvError, match="text obs_str"):
        to_message("x")


def test_a_file_may_import_its_base_class_from_the_facade_and_its_neighbours_relatively(tmp_path):
    folder = tmp_path / "vagen" / "envs" / "push"
    (folder / "utils").mkdir(parents=True)
    source = Path(PUSH).read_text()
    base = "from vagen.envs.gym_image_env import GymImageEnv\n"
    assert base in source
    (folder / "utils" / "words.py").write_text("WORD = 'left'\n")
    (folder / "shared_words.py").write_text("WORD = 'right'\n")
    names = "from vagen.envs import GymImageEnv\nfrom vagen.envs.push.shared_words import WORD as OWN\n"
    (folder / "push_env.py").write_text(source.replace(base, f"{names}from .utils.words import WORD\n"))
    made = rl_vlm.make(f"{folder / 'push_env.py'}:PushEnv")
    assert check_reset(made.reset(options={"index": 0, "split": "train"}))[0].messages[0].role == "system"
    module = sys.modules[type(made._inner).__module__]
    assert (module.WORD, module.OWN) == ("left", "right")
    made.close()


def test_success_makes_the_accuracy_whatever_the_rewards_add_up_to(env):
    env.reset(options={"index": 1, "split": "train"})
    infos = [check_step(env.step(text))[4] for text in ("wait", "right", "right")]
    assert [judged_correct(info, reward=5.0) for info in infos] == [False, False, True]
