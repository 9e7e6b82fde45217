"""vlm-gym's environments, unchanged: its three kinds, create_env, several turns, splits, and what is refused."""

from pathlib import Path

import pytest

import rl_vlm
from rl_vlm.envs.checking import check_environment
from rl_vlm.envs.errors import EnvError, check_reset, check_step
from rl_vlm.envs.foreign.common import held_out
from rl_vlm.types import UserInputError

FOLDER = Path(__file__).parents[1] / "fixtures" / "envs" / "vlm_gym"
NLVR2, CAPTION, GEOSPOT, CREATOR = (
    str(FOLDER / f"{name}.py") for name in ("nlvr2", "vision_caption", "geospot", "creator")
)


@pytest.fixture(autouse=True)
def clean_imports(forgotten):
    forgotten("vlmrl", "nlvr2", "vision_caption")


def opened(env, index=0, split="train"):
    observation, info = check_reset(env.reset(seed=0, options={"index": index, "split": split}))
    return observation.messages[0], info


def test_two_images_and_a_statement():
    env = rl_vlm.make(NLVR2)
    message, _ = opened(env)
    assert message.text == "Look at the two images. train 0: both are red. True or False?"
    assert [image.to_pil().getpixel((0, 0)) for image in message.images] == [(200, 30, 30), (200, 30, 30)]
    observation, reward, terminated, truncated, info = check_step(env.step("True."))
    assert (reward, terminated, truncated, observation.messages) == (1.0, True, False, ())
    assert info["response"] == "true." and info["predicted"] is True
    opened(env, 1)
    assert env.step("True")[1] == 0.0


def test_a_path_and_a_question():
    env = rl_vlm.make(f"{CAPTION}:VisionCaptionEnv")
    message, _ = opened(env)
    assert message.text == "What is shown?" and message.images[0].width == 28
    assert check_step(env.step("A Panda in a bamboo grove."))[1] == 0.5


def test_create_env_is_called_with_its_name_and_the_environments_arguments():
    env = rl_vlm.make(CREATOR, name="truefalse", split="test")
    assert opened(env)[0].text.startswith("Look at the two images. test 0")
    assert rl_vlm.make(f"{CREATOR}:create_env", name="caption").num_items("train") == 1
    with pytest.raises(UserInputError, match="set env.kwargs.name"):
        rl_vlm.make(CREATOR)
    with pytest.raises(UserInputError, match="nope"):
        rl_vlm.make(CREATOR, name="nope")
    with pytest.raises(UserInputError, match="colour"):
        rl_vlm.make(NLVR2, colour="red")


def test_an_episode_goes_on_until_done_and_out_tokens_are_shown():
    env = rl_vlm.make(CREATOR, name="countdown", needed=2)
    assert opened(env, 4)[0].text == "Task 8: go on."
    observation, reward, terminated, truncated, info = check_step(env.step("à propos 🐼"))
    assert observation.messages[0].text == "You said à propos 🐼; 1 left."
    assert (reward, terminated, truncated, info["turn"]) == (0.5, False, False, 1)
    last = check_step(env.step("done"))
    assert last[0].messages == () and last[2:4] == (True, False)


def test_an_episode_without_an_end_is_truncated_and_one_without_a_word_is_an_error():
    env = rl_vlm.make(CREATOR, name="countdown", needed=9, max_turns=2)
    opened(env)
    assert [check_step(env.step("x"))[2:4] for _ in range(2)] == [(False, False), (False, True)]
    silent = rl_vlm.make(f"{CREATOR}:SilentEnv")
    opened(silent)
    with pytest.raises(EnvError, match="no out_tokens"):
        silent.step("x")


def test_splits_are_disjoint():
    env = rl_vlm.make(NLVR2)
    assert (env.num_items("train"), env.num_items("test")) == (9, 1)
    seen = {opened(env, index)[1]["task"] for index in range(9)}
    assert seen == set(range(9)) and opened(env, 0, "test")[1]["task"] == 9
    both = rl_vlm.make(NLVR2, test={"split": "test"})
    assert (both.num_items("train"), both.num_items("test")) == (10, 4)
    assert "test 3" in opened(both, 3, "test")[0].text
    endless = rl_vlm.make(CREATOR, name="countdown")
    assert endless.num_items("train") is None
    numbers = {split: {opened(endless, index, split)[1]["task"] for index in range(9)} for split in ("train", "test")}
    assert not numbers["train"] & numbers["test"]
    with pytest.raises(UserInputError, match="outside the 1 items of the test"):
        opened(env, 1, "test")


@pytest.mark.parametrize(("total", "share"), [(1, 0.5), (2, 0.9), (10, 0.0), (11, 0.1), (1000, 0.25)])
def test_every_task_belongs_to_one_split(total, share):
    train, test = held_out(total, share)
    assert train + test == total and train >= 1 and (test >= 1) == (total > 1 and share > 0)


def test_a_models_tokenizer_is_used_where_one_is_named(tmp_path):
    from rl_vlm.zoo.tiny.tokenizer import build_tokenizer

    build_tokenizer(512).save_pretrained(tmp_path)
    env = rl_vlm.make(CREATOR, name="countdown", tokenizer=str(tmp_path))
    opened(env)
    assert env.step("red square")[0].messages[0].text.startswith("You said red square; 2 left")
    with pytest.raises(UserInputError, match="loaded"):
        rl_vlm.make(CREATOR, name="countdown", tokenizer="/no/such/folder")


def test_an_installed_framework_is_not_replaced(tmp_path, monkeypatch):
    package = tmp_path / "vlmrl" / "envs"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "base.py").write_text("class BaseEnv: origin = 'installed'\nclass BaseState: pass\n")
    (package.parent / "utils").mkdir()
    (package.parent / "utils" / "vlm.py").write_text("def decode_tokens(t, ids): return t.decode(ids)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from rl_vlm.envs.registry import find

    target = tmp_path / "mine.py"
    target.write_text(Path(NLVR2).read_text())
    assert find(str(target)).origin == "installed"


def test_create_env_of_a_checkout_finds_its_modules_under_the_frameworks_name(tmp_path):
    folder = tmp_path / "checkout" / "envs"
    folder.mkdir(parents=True)
    (folder / "pictures.py").write_text(Path(NLVR2).read_text())
    (folder / "creator.py").write_text(
        "def create_env(env_name, tokenizer, **env_kwargs):\n"
        "    from vlmrl.envs.pictures import NLVR2Env\n\n"
        "    return NLVR2Env(tokenizer, **env_kwargs)\n"
    )
    env = rl_vlm.make(str(folder / "creator.py"), name="nlvr2", split="test")
    assert opened(env)[0].text.startswith("Look at the two images. test 0")
    (folder / "lacking.py").write_text("def create_env(name, tokenizer):\n    import vlmrl.envs.nowhere\n")
    with pytest.raises(UserInputError, match="vlmrl.envs.nowhere"):
        rl_vlm.make(str(folder / "lacking.py"), name="nlvr2")


def test_one_environment_with_its_data_serves_all_episodes_of_a_process():
    envs = [rl_vlm.make(GEOSPOT) for _ in range(3)]
    stages = []
    for env in envs:
        opened(env)
        stages.append(env.step("Country: FR")[4]["stage"])
    assert stages[0] == "country" and stages[-1] == "full"  # its count of episodes goes on


def test_what_an_episode_writes_to_its_environment_is_its_own(tmp_path):
    file = tmp_path / "scratch.py"
    file.write_text(
        "from vlmrl.envs.base import BaseEnv\n\n\n"
        "class ScratchEnv(BaseEnv):\n"
        "    def __init__(self, tokenizer):\n"
        "        self.said = 0\n\n"
        "    def reset(self, idx):\n"
        "        return None, {'question': f'Task {idx}'}\n\n"
        "    def step(self, state, action_tokens):\n"
        "        self.said += 1\n"
        "        return state, list(b'more'), float(self.said), self.said == 2, {}\n"
    )
    first, second = (rl_vlm.make(str(file)) for _ in range(2))
    for env in (first, second):
        opened(env)
    rewards = [env.step("x")[1] for env in (first, second, first, second)]
    assert rewards == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.slow
def test_the_check_compares_with_an_environment_of_another_process(tmp_path):
    file = tmp_path / "drawn.py"
    file.write_text(
        "import uuid\nfrom vlmrl.envs.base import BaseEnv\n\n\n"
        "class DrawnEnv(BaseEnv):\n"
        "    num_tasks = 20\n\n"
        "    def __init__(self, tokenizer):\n"
        "        self.word = uuid.uuid4().hex\n\n"
        "    def reset(self, idx):\n"
        "        return None, {'question': f'{idx} {self.word}'}\n\n"
        "    def step(self, state, action_tokens):\n"
        "        return state, [], 0.0, True, {}\n"
    )
    found = {one.name: one.status for one in check_environment(str(file), episodes=2).findings}
    assert found["determinism"] == "fail"
