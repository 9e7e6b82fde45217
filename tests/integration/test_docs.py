"""What the documentation shows is run: the environment of the README, its commands, its links."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.config.recipes import recipe_names
from rl_vlm.config.sweep import load_sweep
from rl_vlm.runs.api import load_run
from rl_vlm.zoo.shapes.environment import shapes_item

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "notebooks").glob("*.ipynb"),
]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_environment_of_the_readme_plays(tiny_folder: Path, tmp_path: Path) -> None:
    _, block = code_blocks(ROOT / "README.md", "python")
    assert len([line for line in block.splitlines() if line.strip() and not line.startswith(("import", "from"))]) <= 15
    (tmp_path / "dots.py").write_text(block)
    arguments = [f"env.id={tmp_path / 'dots.py'}", "env.kwargs={}", f"model.path={tiny_folder}", "--dry-run"]
    assert rl_vlm(["train", str(ROOT / "configs/quickstart.yaml"), *arguments, "--run-dir", str(tmp_path / "run")]) == 0


# Beside what a script shows: an iteration takes seconds.
SMALL = {
    "rollout.prompts_per_iteration": 4, "rollout.num_env_runners": 1, "serving.num_replicas": 1, "evaluation.num_items": 4,
    "evaluation.every": 0, "sight.gate": "off",
}  # fmt: skip


def test_the_script_of_the_readme_trains_on_its_data(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block, _ = code_blocks(ROOT / "README.md", "python")
    assert rl_vlm(["sft-example", str(tmp_path / "my-data")]) == 0
    small = f"overrides={ ({'model.path': str(tiny_folder), 'algorithm.iterations': 1, **SMALL}) })"
    (tmp_path / "train.py").write_text(block.replace("reward=right)", f"reward=right, {small}"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py", run_name="__main__")
    assert "runs/qa_tiny" in capsys.readouterr().out
    run = tmp_path / "runs/qa_tiny"
    # A folder knows the function's name alone.
    assert rl_vlm(["train", str(run / "config.yaml"), "--run-dir", str(run), "--resume"]) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_configurations_that_are_named_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text()
    for command in set(re.findall(r"rl-vlm ([a-z-]+)", text)):
        assert rl_vlm([command, "--help"]) == 0, command
    for config in re.findall(r"configs/[a-z0-9_/]+\.yaml", text):
        assert (ROOT / config).is_file(), config
    for name in re.findall(r"rl-vlm (?:train|plan|sft|sweep) (?!runs/)([a-z0-9_/]+)(?=[\s`])", text):
        assert name in recipe_names(), name
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert target in targets, target
    capsys.readouterr()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metric_names_are_logged(page: Path) -> None:
    source = "".join(path.read_text() for path in (ROOT / "rl_vlm").rglob("*.py"))
    text = page.read_text()
    if page.stem in (
        "slime",
        "vlm_gym",
        "rl_vlm_f",
        "verl",
        "prime_rl",
    ):  # in the first column are the other system's names
        text = re.sub(r"^\| [^|]*\|", "", text, flags=re.MULTILINE)
    for name in re.findall(
        r"`((?:policy|mismatch|rollout|weights|value|reward|curriculum|mixture)/[a-z_0-9]+)/?[`=<{]", text
    ):
        assert f'"{name}' in source, name


CURRICULA = ROOT / "docs" / "curricula.md"


@pytest.mark.parametrize("block", code_blocks(CURRICULA, "yaml"), ids=range(len(code_blocks(CURRICULA, "yaml"))))
def test_the_configurations_about_curricula_pass_a_dry_run(block: str, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(block)
    command = ["train", str(tmp_path / "run.yaml"), f"model.path={tiny_folder}", "--dry-run"]
    assert rl_vlm(command) == 0


def test_the_group_reward_that_is_shown_pays_rare_answers(tmp_path: Path) -> None:
    from rl_vlm.envs.loading import load_plugins
    from rl_vlm.rollout.reward_parts import REWARD_PARTS

    (block,) = code_blocks(CURRICULA, "python")
    (tmp_path / "rare.py").write_text(block)
    load_plugins([str(tmp_path / "rare.py")])
    answered = SimpleNamespace(answers=(("a",), ("x", "a"), ("b",), ("a",)))
    assert REWARD_PARTS["rare"](answered) == [0.25, 0.25, 0.75, 0.25]  # type: ignore[arg-type]


def test_own_data_and_a_reward_function_pass_a_dry_run_as_shown(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_vlm.runs import train as training

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in re.findall(r"```\w+ (\S+)\n(.*?)```", (ROOT / "docs/own_data.md").read_text(), re.DOTALL):
        (tmp_path / name).write_text(text.replace("configs/quickstart.yaml", str(ROOT / "configs/quickstart.yaml")))
    items = [shapes_item("count", "train", index) for index in range(40)]
    cells = [{"photo": one.image.png, "ask": one.question, "gold": one.answer} for one in items]
    pq.write_table(pa.Table.from_pylist(cells), tmp_path / "my.parquet")
    assert rl_vlm(["train", "my.yaml", "--dry-run", f"model.path={tiny_folder}"]) == 0

    def inspect(config: PolicyConfig, place: Path, **options: bool) -> None:
        found = training.inspect_run(
            config.model_copy(update={"model": config.model.model_copy(update={"path": str(tiny_folder)})})
        )
        assert (found["env"], found["train_items"], found["test_items"]) == ("QA-v0", 36, 4)
        assert config.env.reward.functions[0].function == "my_reward:score"
        place.mkdir(parents=True)
        (place / "result.json").write_text('{"reward_after": 0.5}')

    monkeypatch.setattr(training, "train", inspect)
    runpy.run_path("train.py", run_name="__main__")


# After the block of `rl_vlm.serve`.
GONE = """
    import httpx

    try:
        httpx.get(url.replace("/v1", "/health"), timeout=5)
    except httpx.ConnectError:
        print("gone")
"""


@pytest.mark.timeout(600)
@pytest.mark.acceptance  # CI uses the Trainer in test_trainer.py
@pytest.mark.parametrize("script", ["trainer.py", "ask.py"])
def test_scripts_of_the_python_page_run_as_shown(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.findall(r"```python (\S+)\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    small = str(SMALL)[1:-1]
    for name, text in shown:  # it breaks off after the first iteration
        text = text.replace('"algorithm.iterations": 60', f'"algorithm.iterations": 2, {small}')
        (tmp_path / name).write_text(
            text.replace("% 20", "% 1").replace("> 0.9:", ">= 0:") + (GONE if name == "ask.py" else "")
        )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(script, run_name="__main__")
    lines = capsys.readouterr().out.strip().splitlines()
    if script == "ask.py":
        answered, *gone = lines
        assert answered and gone == ["gone"]
        return
    printed = [line.split() for line in lines]
    assert [words[0] for words in printed if words[0] in ("1", "2")] == ["1"]
    assert 0 <= float(printed[-1][0]) <= 1
    run = load_run("runs/mine")  # left early, and saved
    assert (run.metrics["status"], run.metrics["iterations"]) == ("done", 1)
    assert list(run.evaluations["iteration"]) == [0, 1] and run.evaluations["policy_version"].iloc[-1] == 1
    assert (tmp_path / "runs/mine/adapter/adapter_model.safetensors").is_file()
    recipe = str(ROOT / "configs/quickstart.yaml")
    named = f"logging.callbacks=[{tmp_path}/early.py:Enough]"
    assert rl_vlm(["train", recipe, named, "--dry-run", "--run-dir", str(tmp_path / "run")]) == 0


def test_the_command_for_slimes_environments_passes_a_dry_run(tiny_folder: Path) -> None:
    (block,) = (b for b in code_blocks(ROOT / "docs/slime.md", "sh") if "env.id=" in b)
    words = shlex.split(block.replace("\\\n", " ").splitlines()[-1])
    command = words[words.index("train") :]
    command[1] = str(ROOT / "configs/geo3k_tiny.yaml")  # in place of the 2B model's, which wants a GPU
    here = {"env.id": ROOT / "tests/fixtures/envs/score_env.py", "env.data": ROOT / "tests/fixtures/geo3k"}
    command = [f"{key}={here[key]}" if (key := word.partition("=")[0]) in here else word for word in command]
    assert rl_vlm([*command, f"model.path={tiny_folder}", "env.kwargs={max_turns: 3}", "--dry-run"]) == 0


NAMED_BLOCK = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_spaces_of_the_tutorial_fit_its_sweeps(tmp_path: Path) -> None:
    page = ROOT / "docs/tutorial_sweep.md"
    files = dict(NAMED_BLOCK.findall(page.read_text()))
    shown = "\n".join(code_blocks(page, "sh")).replace("\\\n", " ")
    commands = re.findall(r"rl-vlm sweep (\S+) --space (\S+) --run-dir \S+(.*)", shown)
    assert len(commands) == len(files) == 2
    for recipe, space, changes in commands:
        (tmp_path / space).write_text(files[space])
        run, sweep = load_config(ROOT / f"configs/{recipe}.yaml", changes.split()), load_sweep(tmp_path / space)
        sweep.check_space(run)
        sweep.check_evaluations(run)


def write_blocks(page: str, folder: Path) -> None:
    """The files that a page shows, those whose block has a name."""
    for name, text in NAMED_BLOCK.findall((ROOT / f"docs/{page}.md").read_text()):
        (folder / name).write_text(text)


def test_the_tool_of_the_tutorial_passes_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_blocks("tutorial_image_tool", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert rl_vlm(["envs", "check", "boxes.py", "--answers", "answers.txt"]) == 0
    assert "from 0 to 1 for the answers given" in capsys.readouterr().out
    assert len((tmp_path / "boxes.py").read_text().splitlines()) <= 60


def test_the_plans_of_the_tutorial_are_those_that_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = json.loads((ROOT / "tests/fixtures/qwen3_vl.json").read_text())["2b"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    page = ROOT / "docs/tutorial_first_gpu.md"
    commands = re.findall(r"rl-vlm plan (.+)", "\n".join(code_blocks(page, "sh")).replace("\\\n", " "))
    plans = code_blocks(page, "text")
    assert len(commands) == len(plans) == 2
    for command, plan in zip(commands, plans, strict=True):
        assert rl_vlm(["plan", *command.split(), f"model.path={tmp_path}"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert {line for line in plan.splitlines() if line.startswith("  ") and "..." not in line} <= {*printed}


def test_verls_data_and_reward_pass_a_dry_run_as_shown(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blocks("verl", tmp_path)
    truths = "return float(ground_truth in solution_str and extra_info['index'] == 0)"
    (tmp_path / "my_score.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {truths}\n"
    )
    for split in ("train", "test"):
        item = shapes_item("count", split, 0)
        row = {
            "data_source": "shapes",
            "prompt": [{"role": "user", "content": "<image>How many shapes?"}],
            "images": [{"bytes": item.image.png, "path": None}],
            "reward_model": {"style": "rule", "ground_truth": item.answer},
            "extra_info": {"split": split, "index": 0},
        }
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{split}.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert rl_vlm(["train", "run.yaml", "--dry-run", f"model.path={tiny_folder}"]) == 0
    columns = {name: [row[name]] * 2 for name in ("data_source", "reward_model", "extra_info")}
    said = [[{"role": "assistant", "content": text}] for text in (item.answer, "?")]
    assert runpy.run_path("from_verl.py")["score"](said, **columns) == [1.0, 0.0]


# The names of RL-VLM-F's prompt.py, with texts of our own.
PROMPT_PY = """
goal_env_prompts = {"metaworld_soccer-v2": "to score", "CartPole-v1": "to balance"}
clip_env_prompts = {"metaworld_soccer-v2": "A goal.", "CartPole-v1": "A pole."}
gemini_free_query_prompt1, gemini_free_query_prompt2, gemini_score_prompt_start = "One:", "Two:", "Look:"
gemini_free_query_template, gemini_single_query_prompt_template = "Nearer: {}?", "Which is nearer: {}?"
gemini_summary_template = "Wanted: {}. Said: {}. Which?"
gemini_score_template, gemini_score_summary_template = "Score: {}?", "Wanted: {}. Said: {}. Score?"
"""


def test_the_originals_prompts_are_converted_as_shown(tmp_path: Path) -> None:
    from rl_vlm.labelling.prompts import task_prompts

    (block,) = code_blocks(ROOT / "docs" / "rl_vlm_f.md", "python")
    (tmp_path / "prompt.py").write_text(PROMPT_PY)
    (tmp_path / "convert.py").write_text(block)
    subprocess.run([sys.executable, "convert.py"], cwd=tmp_path, check=True, timeout=60)
    prompts = task_prompts("metaworld_soccer-v2", tmp_path / "originals.yaml")
    assert (prompts.goal, prompts.description, prompts.templates.first) == ("to score", "A goal.", "One:")
    assert prompts.fill(prompts.templates.describe) == "Nearer: to score?"
    assert prompts.fill(prompts.templates.summarise, answer="the first") == "Wanted: to score. Said: the first. Which?"


CLUSTER_PAGES = [ROOT / "docs" / f"{name}.md" for name in ("cluster", "slurm", "kubernetes", "cloud", "onprem")]


@pytest.mark.parametrize("page", [*CLUSTER_PAGES, ROOT / "docs/tutorial_first_cluster.md"], ids=lambda page: page.stem)
def test_the_commands_about_clusters_are_shell_and_name_files_that_there_are(page: Path) -> None:
    for block in code_blocks(page, "sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, timeout=30)
    for name in re.findall(r"\bcluster/[\w./-]*\w", page.read_text()):
        # The reader makes the overlay of a run of his own.
        assert name == "cluster/kuberay/overlays/geo3k" or (ROOT / name).exists(), name


@pytest.mark.parametrize("page", CLUSTER_PAGES, ids=lambda page: page.stem)
def test_the_runs_that_are_shown_have_valid_settings(page: Path) -> None:
    blocks = "\n".join(code_blocks(page, "sh")).replace("\\\n", " ")
    shown = re.findall(r"(?:rl-vlm train|grpo\.sbatch) (\S+)((?: +[\w.]+=\S+)*)", blocks)
    assert shown or page.stem == "onprem"
    for config, settings in shown:
        path = None if config == "CONFIG" else ROOT / config.removeprefix("/opt/rl_vlm/")
        run = load_config(path, settings.split())
        if "learners_on" in settings or "sbatch" in blocks:
            assert run.learner.num_learners >= 1  # a learner in the driver would have no GPU on the head
