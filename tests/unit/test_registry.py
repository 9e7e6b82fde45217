"""The registry's ways to name an environment: id, module and file."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rl_vlm
from rl_vlm.envs import registry
from rl_vlm.envs.errors import EnvError, check_reset, check_step, reward_parts
from rl_vlm.envs.foreign.slime import SlimeEnv
from rl_vlm.registry import provided
from rl_vlm.types import Message, Observation, UserInputError

TESTS = Path(__file__).parents[1]
BROKEN = TESTS / "fixtures" / "envs" / "broken_env.py"


def test_a_vision_env_is_made_by_file_and_by_module(on_path):
    for spec in (str(BROKEN), f"{BROKEN}:BrokenEnv", "envs.broken_env", "envs.broken_env:BrokenEnv"):
        env = rl_vlm.make(spec, hello="hi")
        assert type(env).__name__ == "BrokenEnv"
        assert "hi" in env.reset()[0].messages[0].text


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_env.py").write_text("VALUE = 'from next door'")
    (tmp_path / "env.py").write_text(
        "from neighbour_of_env import VALUE\nfrom rl_vlm.envs.base import VisionEnv\n"
        "from rl_vlm.types import Observation\n"
        "class E(VisionEnv):\n    def reset(self, *, seed=None, options=None):\n        return Observation.user(VALUE), {}\n"
    )
    assert rl_vlm.make(str(tmp_path / "env.py")).reset()[0].messages[0].text == "from next door"


TWO = "from rl_vlm.envs.base import VisionEnv\nclass A(VisionEnv): pass\nclass B(VisionEnv): pass\n"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("x = 1", "", "neither a VisionEnv subclass nor a build_env"),
        (TWO, "", "several environments: name one of A, B"),
        (TWO, ":C", "has no 'C'"),
        ("x = 1", ":x", "names a int"),
        ("def make(): return 5", ":make", "not a VisionEnv"),
        ("import no_such_module_at_all", "", "install no_such_module_at_all, or run again with PYTHONPATH"),
        ("def (", "", "cannot be imported .SyntaxError"),
        (TWO, ":A?", "has no 'A"),
    ],
)
def test_a_file_without_a_usable_environment_says_so(tmp_path, content, name, message):
    (tmp_path / "env.py").write_text(content)
    with pytest.raises(UserInputError, match=message):
        rl_vlm.make(f"{tmp_path / 'env.py'}{name}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Geo3k-v1", "Did you mean Geo3k-v0"),
        ("nonsense", "Unknown environment"),
        ("", "Unknown environment"),
        ("no.such.module", "cannot be imported"),
        ("no such/file.py", "There is no file"),
        ("a b.c:D", "Unknown environment"),
    ],
)
def test_an_unknown_environment_is_refused(spec, message):
    with pytest.raises(UserInputError, match=message):
        rl_vlm.make(spec)


def test_a_registered_function_or_class_is_made(registered):
    rl_vlm.register("Mine-v0", lambda size=1: SlimeEnv(lambda sample, args: None, max_turns=size))
    assert isinstance(rl_vlm.make("Mine-v0", size=2), SlimeEnv)
    with pytest.raises(UserInputError, match="arguments"):
        rl_vlm.make("Mine-v0", sizes=2)
    with pytest.raises(UserInputError, match="this process"):
        registry.portable_id("Mine-v0")
    rl_vlm.register("Geo-v9", "rl_vlm.zoo.geo3k.environment:Geo3kEnv")
    assert registry.portable_id("Geo-v9") == "rl_vlm.zoo.geo3k.environment:Geo3kEnv"


def test_an_installed_package_registers_ids_by_entry_points(tmp_path, monkeypatch, capsys):
    (tmp_path / "packaged_env.py").write_text(BROKEN.read_text())
    info = tmp_path / "packaged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rl_vlm.envs]\nPackaged-v0 = packaged_env:BrokenEnv\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    provided.cache_clear()
    assert "hi" in rl_vlm.make("Packaged-v0", hello="hi").reset()[0].messages[0].text
    assert "Packaged-v0" in registry.registered()
    assert registry.portable_id("Packaged-v0") == "Packaged-v0"
    with pytest.raises(UserInputError, match="Packaged-v0"):
        rl_vlm.make("Packaged-v1")


# --- The check of what an environment returns


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
    with pytest.raises(EnvError):  # nor is it what a reset returns
        check_reset(result)


def test_a_part_does_not_take_the_place_of_the_reward_itself():
    assert reward_parts({"reward_parts": {"format": 0.5}}) == (("format", 0.5),)
    with pytest.raises(EnvError, match="part 'env'"):
        reward_parts({"reward_parts": {"env": 5.0}})
