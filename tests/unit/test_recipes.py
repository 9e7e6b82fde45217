"""Recipes by name, `rl-vlm recipes`, `recipes copy` and `init`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import load_config, load_sft_config
from rl_vlm.config.recipes import FOLDER, find_config, read_recipe, recipe_names
from rl_vlm.types import UserInputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: one without a recipe, a configuration or a run."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_file_of_configs_is_a_recipe() -> None:
    files = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.yaml")}
    names = recipe_names()
    assert set(names) == files and "quickstart" in names and "rl_vlm_f/drawer_open" in names
    assert names.index("zoom_tiny") < names.index("rl_vlm_f/assembly")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_what_it_needs_and_is_valid(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.purpose.endswith(".") and len(recipe.purpose) <= 100
    assert recipe.needs and recipe.takes and recipe.expect
    settings = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert recipe.model == settings.get("model", {}).get("path", "")
    loaded = load_sft_config(name) if "sft" in settings else load_config(name)
    assert re.sub(r"\W", "_", loaded.name) == name.rpartition("/")[2]


def test_a_name_means_the_recipe_where_no_such_file_or_folder_is(empty_folder: Path) -> None:
    assert load_config("quickstart").name == "quickstart"
    assert find_config("rl_vlm_f/drawer_open").samefile(ROOT / "configs/rl_vlm_f/drawer_open.yaml")
    assert find_config("quickstart.yaml") == Path("quickstart.yaml")  # a file, which is missed as files are
    (empty_folder / "quickstart").mkdir()
    with pytest.raises(UserInputError, match="quickstart is no run folder"):
        find_config("quickstart")
    (empty_folder / "quickstart/config.yaml").write_text("name: mine\n")
    assert load_config("quickstart").name == "mine"
    (empty_folder / "soccer").write_text("name: mine\n")
    assert load_config("soccer").name == "mine"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("quikstart", "did you mean quickstart?"),
        ("drawer_opn", "did you mean rl_vlm_f/drawer_open"),
        ("runs/none", "quickstart` first"),
        ("tiny", "as in `quickstart model.path=tiny`"),
        ("Qwen/Qwen3-VL-2B", "as in `quickstart model.path=Qwen/Qwen3-VL-2B`"),
        ("../../pyproject", "/.. are: "),
    ],
)
def test_an_unknown_name_gets_one_sentence(name: str, hint: str, empty_folder: Path) -> None:
    for load in (load_config, load_sft_config):
        with pytest.raises(UserInputError) as error:
            load(name)
        assert hint in str(error.value)
        assert len(str(error.value).splitlines()) == 1


def test_a_recipe_is_copied_and_nothing_is_overwritten(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_vlm(["recipes", "copy", "rl_vlm_f/soccer"]) == 0
    assert load_config("soccer.yaml") == load_config("rl_vlm_f/soccer")
    Path("soccer.yaml").write_text("mine")
    assert rl_vlm(["recipes", "copy", "rl_vlm_f/soccer"]) == 2
    assert "soccer.yaml exists" in capsys.readouterr().err and Path("soccer.yaml").read_text() == "mine"
    assert rl_vlm(["recipes", "copy", "rl_vlm_f/soccer", "--overwrite"]) == 0
    assert rl_vlm(["recipes", "copy", "quickstart", "mine.yaml"]) == 0
    assert load_config("mine.yaml") == load_config("quickstart")
    assert rl_vlm(["recipes", "copy", "quickstart", "none/mine.yaml"]) == 2
    assert rl_vlm(["recipes", "copy", "quikstart"]) == 2
    assert "did you mean quickstart?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a b", "x:", ".hidden", "né"])
def test_a_name_that_yaml_would_read_otherwise_is_no_project(name: str, empty_folder: Path) -> None:
    assert rl_vlm(["init", name]) == 2
    assert not any(empty_folder.iterdir())
