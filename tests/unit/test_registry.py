"""The registry's ways to name an environment: id, module and file."""

from pathlib import Path

import pytest

import rl_vlm
from rl_vlm.envs import registry
from rl_vlm.envs.foreign.slime import SlimeEnv
from rl_vlm.types import UserInputError

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
    assert "hi" in rl_vlm.make("Packaged-v0", hello="hi").reset()[0].messages[0].text
    assert "Packaged-v0" in registry.registered()
    assert registry.portable_id("Packaged-v0") == "Packaged-v0"
    with pytest.raises(UserInputError, match="Packaged-v0"):
        rl_vlm.make("Packaged-v1")
