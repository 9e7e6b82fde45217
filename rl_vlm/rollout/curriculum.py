"""Curriculum: a mixture whose tasks change in stages, by episodes, by iterations, or by a metric with hysteresis."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_vlm.config import RunConfig
from rl_vlm.rollout.mixture import Mixture, TaskItem
from rl_vlm.rollout.stages import Stages, numbers_in
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import TrajectoryGroup, UserInputError


class Curriculum(Mixture):
    """Lays the arguments and weights of the current stage over a mixture.

    By episodes, those are counted that were sampled (also of groups that are not learned from); by iterations, the learner's steps. By
    metric, a stage ends when the mean over the newest `window` of its own episodes reaches its `until`, and it goes back to the
    stage before when that mean is `fall_back_margin` below the value which ended that one. After each move `min_episodes` of the new
    stage come first, so a noisy metric does not make it flicker. Which of its tasks were solved is forgotten at each move.

    Args:
        run: the stages and when they end, and what Mixture needs.
        sizes: size of each training split; None for items without end.
    """

    def __init__(self, run: RunConfig, sizes: Mapping[str, int | None]) -> None:
        self._settings, self._stages = run.curriculum, Stages(run.curriculum, run.env)
        self.stage = 0
        super().__init__(self._stages.weights(0), sizes, run.seed, run.curriculum)
        self._episodes = self._iteration = 0
        self._in_stage = 0  # episodes since the stage began
        self._window: deque[tuple[float, float]] = deque(maxlen=run.curriculum.window)  # solved, reward of each episode
        self._in_stages: Counter[int] = Counter()  # tasks handed out in each

    def begin(self, iteration: int) -> None:
        """See Mixture."""
        self._iteration = iteration
        self._move()

    def take(self, count: int) -> list[TaskItem]:
        """The next `count` tasks, as the stage has them."""
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
        for group in current:
            self._window.extend((float(one.correct), one.reward) for one in group.trajectories)
            self._in_stage += len(group)
        self._episodes += sum(len(group) for group in groups)
        self._move()

    def lose(self, tasks: Sequence[RolloutTask]) -> None:
        """Note the lost tasks of this stage."""
        super().lose([task for task in tasks if task.stage == self.stage])

    def _move(self) -> None:
        stage = self._stage_by_metric() if self._settings.by == "metric" else self._stage_by_count()
        if stage != self.stage:
            self.stage, self._in_stage = stage, 0
            self._window.clear()
            self.forget_rates()

    def _stage_by_count(self) -> int:
        return max(place for place, stage in enumerate(self._settings.stages) if (stage.start or 0) <= self._done)

    def _stage_by_metric(self) -> int:
        settings, stage = self._settings, self.stage
        if self._in_stage < settings.min_episodes:
            return stage
        value = self._mean("solve_rate" if settings.metric == "solve_rate" else "reward")
        until = settings.stages[stage].until
        if until is not None and value >= until:
            return stage + 1
        let_in = settings.stages[stage - 1].until if stage else None
        if let_in is not None and settings.fall_back_margin is not None and value < let_in - settings.fall_back_margin:
            return stage - 1
        return stage

    def _mean(self, metric: str) -> float:
        place = 0 if metric == "solve_rate" else 1
        return sum(episode[place] for episode in self._window) / max(len(self._window), 1)

    @property
    def _done(self) -> int:
        return self._iteration if self._settings.by == "iterations" else self._episodes

    def _share(self) -> float:
        return self._stages.share(self.stage, self._done)

    def metrics(self) -> dict[str, float]:
        """Stage (the first is 0), its recent solve rate, tasks handed out in each, and the numbers that stages set."""
        names = self._settings.names
        share = self._share()
        found = {
            "curriculum/stage": float(self.stage),
            "curriculum/stages": float(len(self._stages)),
            "curriculum/episodes": float(self._episodes),
            **{f"curriculum/taken/{name}": float(self._in_stages[place]) for place, name in enumerate(names)},
            **super().metrics(),
        }
        if self._window:
            found["curriculum/solve_rate"] = self._mean("solve_rate")
        for env, arguments in self._stages.values(self.stage, share).items():
            where = f"curriculum/value/{env}." if env else "curriculum/value/"
            found |= {where + name: value for name, value in numbers_in(arguments)}
        return found

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {
            "stages": list(self._settings.names),
            "stage": self.stage,
            "episodes": self._episodes,
            "iteration": self._iteration,
            "in_stage": self._in_stage,
            "window": [list(episode) for episode in self._window],
            "taken": {str(stage): count for stage, count in self._in_stages.items()},
            "mixture": super().state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state. Raises UserInputError where the stages are others."""
        if state.get("stages") != list(self._settings.names):
            saved = state.get("stages")
            raise UserInputError(
                f"The checkpoint's curriculum has {'the stages ' + ', '.join(saved) if saved else 'no stages'}: resume with the "
                "curriculum that the run began with."
            )
        self.stage, self._episodes = int(state["stage"]), int(state["episodes"])
        self._iteration, self._in_stage = int(state["iteration"]), int(state["in_stage"])
        self._window.clear()
        self._window.extend((float(solved), float(reward)) for solved, reward in state["window"])
        self._in_stages = Counter({int(stage): int(count) for stage, count in state["taken"].items()})
        super().restore(state["mixture"])
        self.weights = self._stages.weights(self.stage, self._share())


def make_task_source(run: RunConfig, sizes: Mapping[str, int | None]) -> Mixture:
    """The task source that the configuration asks for; `sizes` of the training splits by name of the environment."""
    if run.curriculum.stages:
        return Curriculum(run, sizes)
    weights = {part.name: part.weight for part in run.env.mixture} or {"": 1.0}
    return Mixture(weights, sizes, run.seed, run.curriculum)
