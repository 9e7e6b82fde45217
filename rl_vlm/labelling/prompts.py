"""What a labeller is asked about each task: RL-VLM-F's tasks, or those of a YAML file:

push-button: to press the red button all the way down     # the goal alone, or:
stack:
  goal: to stack the blue cube on the green one
  description: The blue cube stands on the green cube.    # for similarity of image and text
  templates:
    describe: What do you see? The goal is {goal}. Which image is nearer to it?
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from pydantic import ValidationError

from rl_vlm.config.complaints import explain
from rl_vlm.config.loading import load_yaml_file
from rl_vlm.labelling.templates import TaskPrompts, Templates
from rl_vlm.types import UserInputError

# RL-VLM-F's names of tasks, where they differ by more than prefix, version and hyphens.
_ALIASES = {
    "continuouscartpole": "cartpole",
    "ropeflatteneasy": "ropeflatten",
    "clothfolddiagonal": "clothfold",
    "drawer": "draweropen",
    "sweep": "sweepinto",
}
# Goal, and what the achieved goal looks like.
_GOALS = {
    "cartpole": (
        "to balance the brown pole upright on the black cart",
        "The brown pole stands vertically upright on the black cart.",
    ),
    "drawer-open": ("to open the drawer", "The drawer is open."),
    "sweep-into": ("to bring the green cube as close as possible to the hole", "The green cube is in the hole."),
    "soccer": ("to move the soccer ball into the goal", "The soccer ball is in the goal."),
    "door-open": ("to open the door of the safe", "The door of the safe is open."),
    "assembly": ("to pick up the nut and place it onto the peg", "The nut is on the peg."),
    "box-close": ("to grasp the cover and close the box with it", "The box is closed by its cover."),
    "coffee-push": ("to push the mug under the coffee machine", "The mug is under the coffee machine."),
    "stick-pull": (
        "to grasp the stick and pull the box with it",
        "The box has been pulled to the goal with the stick.",
    ),
    "rope-flatten": ("to straighten the blue rope", "The blue rope is straight."),
    "pass-water": (
        "to move the container of water as close as possible to the red circle, without spilling much water",
        "The container is at the red circle and holds its water.",
    ),
    "cloth-fold": (
        "to fold the cloth along its diagonal, from the top left corner to the bottom right corner",
        "The cloth is folded diagonally, its top left corner on its bottom right corner.",
    ),
}
TASKS = {name: TaskPrompts(goal=goal, description=description) for name, (goal, description) in _GOALS.items()}
TASKS["cartpole-tiny"] = TaskPrompts(  # for `tiny-labeller`, whose every token costs
    goal="an upright pole",
    description="The pole is upright.",
    templates=Templates(first="1:", second=" 2:", decide=" The goal is {goal}: 0, 1 or -1."),
)


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
    near = difflib.get_close_matches(short, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(names)}."
    raise UserInputError(
        f"There are no prompts for the task {task!r}. {hint} Another goal can be given in words, or in a YAML file."
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
