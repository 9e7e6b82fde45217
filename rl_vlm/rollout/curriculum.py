"""The environment arguments and weights of a curriculum's stages, blended between stages where asked."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_vlm.config import CurriculumSection, EnvSection, PolicyConfig
from rl_vlm.rollout.mixture import Mixture, TaskItem
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import TrajectoryGroup, UserInputError

_NEWEST = 256  # episodes over which `curriculum/solve_rate` is the mean


def env_weights(env: EnvSection) -> dict[str, float]:
    """Weights of a mixture's environments by name; a single one has the empty name."""
    return {part.name: part.weight for part in env.mixture} or {"": 1.0}


def blend(here: Any, there: Any, share: float) -> Any:
    """`here` moved by `share` (0 to 1) of the way to `there`.

    Numbers move linearly, and stay integers (rounded, halves up) where both are. Lists of the same length and mappings
    move item by item. Whatever else differs stays as it is here.
    """
    if all(isinstance(end, int | float) and not isinstance(end, bool) for end in (here, there)):
        value = here + (there - here) * share
        return math.floor(value + 0.5) if isinstance(here, int) and isinstance(there, int) else value
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        return [blend(one, other, share) for one, other in zip(here, there, strict=True)]
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        return {name: blend(value, there[name], share) if name in there else value for name, value in here.items()}
    return here


class Stages:
    """What each stage sets: arguments that are laid over the environment's own, not over those of the stage before.

    Between two stages a number that one of them leaves out moves from or to the environment's own, where it has one.
    """

    def __init__(self, settings: CurriculumSection, env: EnvSection) -> None:
        self._settings = settings
        self._own = {name: part.kwargs for name, part in env.parts.items()}
        self._weights = env_weights(env)

    def share(self, stage: int, done: int) -> float:
        """How far a run with `done` episodes or iterations is from the stage's start to the next one's: 0 to below 1 in
        steps of 1 / blend_levels; 0 without blending and in the last stage."""
        settings = self._settings
        if not settings.blend or stage + 1 >= len(settings.stages):
            return 0.0
        start, end = settings.stages[stage].start, settings.stages[stage + 1].start
        level = (done - start) * settings.blend_levels // (end - start)
        return min(max(level, 0), settings.blend_levels - 1) / settings.blend_levels

    def arguments(self, stage: int, share: float = 0.0) -> dict[str, dict[str, Any]]:
        """By name of the environment: what the stage changes in its arguments."""
        here = {name: self._of(stage, name) for name in self._own}
        if not share:
            return here
        found = {}
        for name, own in self._own.items():
            there = self._of(stage + 1, name)
            before, after = {**own, **here[name]}, {**own, **there}
            # An argument that only the next stage knows has no value to move from.
            keys = [key for key in before if key in here[name] or key in there]
            found[name] = {key: blend(before[key], after[key], share) if key in after else before[key] for key in keys}
        return found

    def _of(self, stage: int, name: str) -> dict[str, Any]:
        given = self._settings.stages[stage].env
        return dict(given.get(name, {})) if name else given

    def weights(self, stage: int, share: float = 0.0) -> dict[str, float]:
        """By name of the environment: its weight."""
        here = self._weights | self._settings.stages[stage].mixture
        if not share:
            return here
        return dict(blend(here, self._weights | self._settings.stages[stage + 1].mixture, share))

    def all_arguments(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """All that will ever be set, equal arguments once: where they come from, the environment's name, and they."""
        levels = self._settings.blend_levels if self._settings.blend else 1
        seen: list[tuple[str, dict[str, Any]]] = []
        for stage, title in enumerate(self._settings.names):
            for level in range(levels if stage + 1 < len(self._settings.stages) else 1):
                for name, arguments in self.arguments(stage, level / levels).items():
                    if (name, arguments) not in seen:
                        seen.append((name, arguments))
                        between = f", {level}/{levels} of the way to the next" if level else ""
                        yield f"curriculum.stages, stage {title}{between}", name, arguments


class Curriculum(Mixture):
    """Lays the arguments and weights of the current stage over a mixture.

    By episodes, those are counted that were sampled (also of groups that are not learned from); by iterations, the
    learner's steps. Which of its tasks were solved is forgotten at each move.
    """

    def __init__(self, run: PolicyConfig, sizes: Mapping[str, int | None]) -> None:
        self._settings, self._stages = run.curriculum, Stages(run.curriculum, run.env)
        self.stage = 0
        super().__init__(self._stages.weights(0), sizes, run.seed, run.curriculum.sampling == "solve_rate")
        self._episodes = self._iteration = 0
        self._newest: deque[bool] = deque(maxlen=_NEWEST)  # of the stage's episodes, which were solved
        self._in_stages: Counter[int] = Counter()  # tasks handed out in each

    def begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._move()

    def take(self, count: int) -> list[TaskItem]:
        share = self._share()
        self.weights = self._stages.weights(self.stage, share)
        arguments = self._stages.arguments(self.stage, share)
        self._in_stages[self.stage] += count
        return [replace(item, arguments=arguments[item.env], stage=self.stage) for item in super().take(count)]

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Count episodes, and move to another stage when it is time."""
        # What was handed out in an earlier stage says nothing about this one's tasks.
        current = [group for group in groups if group.stage == self.stage]
        super().observe(current)
        self._newest.extend(one.correct for group in current for one in group.trajectories)
        self._episodes += sum(len(group) for group in groups)
        self._move()

    def lose(self, tasks: Sequence[RolloutTask]) -> None:
        super().lose([task for task in tasks if task.stage == self.stage])

    def _move(self) -> None:
        stage = max(place for place, stage in enumerate(self._settings.stages) if stage.start <= self._done)
        if stage != self.stage:
            self.stage = stage
            self._newest.clear()
            self.forget_rates()

    @property
    def _done(self) -> int:
        return self._iteration if self._settings.by == "iterations" else self._episodes

    def _share(self) -> float:
        return self._stages.share(self.stage, self._done)

    def metrics(self) -> dict[str, float]:
        """Stage (the first is 0), its recent solve rate, and tasks handed out in each."""
        names = self._settings.names
        found = {
            "curriculum/stage": float(self.stage),
            "curriculum/stages": float(len(names)),
            "curriculum/episodes": float(self._episodes),
            **{f"curriculum/taken/{name}": float(self._in_stages[place]) for place, name in enumerate(names)},
            **super().metrics(),
        }
        if self._newest:
            found["curriculum/solve_rate"] = sum(self._newest) / len(self._newest)
        return found

    def state(self) -> dict[str, Any]:
        return {
            "stages": list(self._settings.names),
            "stage": self.stage,
            "episodes": self._episodes,
            "iteration": self._iteration,
            "newest": list(self._newest),
            "taken": {str(stage): count for stage, count in self._in_stages.items()},
            "mixture": super().state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state. Raises UserInputError where the stages are others."""
        if state.get("stages") != list(self._settings.names):
            saved = state.get("stages")
            raise UserInputError(
                f"The checkpoint's curriculum has {'the stages ' + ', '.join(saved) if saved else 'no stages'}: resume "
                "with the curriculum that the run began with."
            )
        self.stage, self._episodes = int(state["stage"]), int(state["episodes"])
        self._iteration = int(state["iteration"])
        self._newest.clear()
        self._newest.extend(map(bool, state["newest"]))
        self._in_stages = Counter({int(stage): int(count) for stage, count in state["taken"].items()})
        super().restore(state["mixture"])
        self.weights = self._stages.weights(self.stage, self._share())


def make_task_source(run: PolicyConfig, sizes: Mapping[str, int | None]) -> Mixture:
    """The task source that the configuration asks for; `sizes` of the training splits by name of the environment."""
    if run.curriculum.stages:
        return Curriculum(run, sizes)
    return Mixture(env_weights(run.env), sizes, run.seed, run.curriculum.sampling == "solve_rate")
