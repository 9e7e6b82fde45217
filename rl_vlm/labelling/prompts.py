"""What a labeller is asked about each task: RL-VLM-F's tasks (`tasks.yaml`), or those of a YAML file:

push-button: to press the red button all the way down     # the goal alone, or:
stack:
  goal: to stack the blue cube on the green one
  description: The blue cube stands on the green cube.    # for similarity of image and text
  templates:
    describe: What do you see? The goal is {goal}. Which image is nearer to it?
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from rl_vlm.config.complaints import explain
from rl_vlm.config.loading import load_yaml_file
from rl_vlm.labelling.templates import TaskPrompts
from rl_vlm.registry import suggestion
from rl_vlm.types import UserInputError

# RL-VLM-F's names of tasks, where they differ by more than prefix, version and hyphens.
_ALIASES = {
    "continuouscartpole": "cartpole",
    "ropeflatteneasy": "ropeflatten",
    "clothfolddiagonal": "clothfold",
    "drawer": "draweropen",
    "sweep": "sweepinto",
}


def task_prompts(task: str, file: str | Path | None = None, goal: str = "") -> TaskPrompts:
    """The prompts of a task, from the user's file first, then from `TASKS`; else our own templates with the `goal`.
    RL-VLM-F's names, such as `metaworld_drawer-open-v2`, are understood. Raises UserInputError."""
    own = load_prompts(file) if file is not None else {}
    short = _short_name(task)
    for named in (own, TASKS):
        known = named.get(task) or {_short_name(name): prompts for name, prompts in named.items()}.get(short)
        if known is not None:
            return known
    if goal:
        return TaskPrompts(goal=goal)
    names = [*own, *sorted(TASKS)]
    hint = suggestion(short, names, 0.5) or f" Known are {', '.join(names)}."
    raise UserInputError(
        f"There are no prompts for the task {task!r}.{hint} Another goal can be given in words, or in a YAML file."
    )


def load_prompts(path: str | Path) -> dict[str, TaskPrompts]:
    """Read a user's prompts. Raises UserInputError on the first thing that is wrong."""
    file = Path(path)
    data = load_yaml_file(file, "file of prompts")
    if not isinstance(data, dict) or not data:
        raise UserInputError(
            f"The prompts in {file} must map names of tasks to goals, such as `stack: to stack cubes`."
        )
    tasks = {}
    for name, value in data.items():
        keys = value if isinstance(value, dict) else {"goal": value}
        try:
            tasks[str(name)] = TaskPrompts.model_validate(keys)
        except ValidationError as error:
            raise UserInputError(f"The prompts in {file}, task {name!r}: {explain(error, TaskPrompts)}") from error
    return tasks


def _short_name(task: str) -> str:
    short = re.sub(r"^(metaworld|softgym|meta-world)[_/]", "", task.strip(), flags=re.IGNORECASE)
    short = re.sub(r"[-_]v\d+$", "", short).lower().replace("_", "").replace("-", "")
    return _ALIASES.get(short, short)


TASKS = load_prompts(Path(__file__).with_name("tasks.yaml"))
