"""GridWalk-v0: walk over a drawn grid to the goal, one move a turn; the reward comes at the end.

A small task in which credit matters: several turns decide about one number, and states come back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from PIL import Image

from rl_vlm.envs.base import Info, MadeItemsEnv, StepResult
from rl_vlm.types import EncodedImage, Observation, UserInputError
from rl_vlm.zoo.gridwalk import data
from rl_vlm.zoo.gridwalk.data import Difficulty, Grid, grid_item

MIN_TURNS, MAX_TURNS = 2, 10
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 64, 1024
PROMPTS = ("full", "brief")


@lru_cache(maxsize=65_536)
def picture_of(grid: Grid, image_size: int = data.IMAGE_SIZE) -> EncodedImage:
    """The picture of a state. Equal states give equal bytes, so a picture's hash names its state."""
    return EncodedImage.from_pil(Image.fromarray(data.render(grid, image_size)))


def parse_move(text: str) -> str | None:
    """The move, if the last word is one of the four (any case, a full stop allowed); None otherwise.

    What stands before it is the policy's thinking.
    """
    words = text.strip().removesuffix(".").lower().split()
    return words[-1] if words and words[-1] in data.MOVES else None


class GridWalkEnv(MadeItemsEnv):
    """Walk to the goal of a drawn grid around walls and holes: one move (up, down, left or right) a turn.

    size: cells per side, 3 to 6; walls and holes: how many. Walls stop the agent, a hole ends the episode.
    max_turns: 2 to 10; when they are used up the episode ends. min_distance: steps of the shortest path at least.
    prompt: "full" explains the game in the first message; "brief" asks in three words, for the tiny model.
    image_size: pixels per side. seed: which data set of grids; num_train and num_test: how many of each it holds.

    The reward is 1 at the goal and 0 otherwise. A turn that is no move is answered with what is expected and used up.
    Every grid can be solved in `max_turns`. `info` holds `success`, `outcome` ("goal", "hole", "turns" or "walking"),
    `steps` (turns used), `well_formed`, and `shortest_path` (steps from the start).
    """

    def __init__(
        self,
        size: int = 4,
        *,
        walls: int = 2,
        holes: int = 2,
        max_turns: int = 8,
        min_distance: int = 3,
        prompt: str = "full",
        image_size: int = data.IMAGE_SIZE,
        seed: int = 0,
        num_train: int = 4096,
        num_test: int = 512,
    ) -> None:
        super().__init__("GridWalk-v0", num_train, num_test)
        bounds = {
            "size": (size, data.MIN_SIZE, data.MAX_SIZE),
            "max_turns": (max_turns, MIN_TURNS, MAX_TURNS),
            "image_size": (image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE),
        }
        for name, (value, least, most) in bounds.items():
            if not _is_integer(value) or not least <= value <= most:
                raise UserInputError(
                    f"GridWalk-v0: env.kwargs.{name} must be an integer from {least} to {most}, not {value!r}."
                )
        for name, value, least in (
            ("walls", walls, 0), ("holes", holes, 0), ("num_train", num_train, 1), ("num_test", num_test, 1),
        ):  # fmt: skip
            if not _is_integer(value) or value < least:
                raise UserInputError(
                    f"GridWalk-v0: env.kwargs.{name} must be an integer of at least {least}, not {value!r}."
                )
        if walls + holes > size * size - 2:
            raise UserInputError(
                f"GridWalk-v0: env.kwargs.walls ({walls}) and holes ({holes}) leave no room for agent and goal in {size}×{size} cells: "
                "lower one, or raise size."
            )
        if not _is_integer(min_distance) or not 1 <= min_distance <= max_turns:
            raise UserInputError(
                f"GridWalk-v0: env.kwargs.min_distance must be an integer from 1 to env.kwargs.max_turns ({max_turns}), not {min_distance!r}."
            )
        if prompt not in PROMPTS:
            raise UserInputError(
                f"GridWalk-v0: env.kwargs.prompt {prompt!r} is unknown; choose one of {', '.join(PROMPTS)}."
            )
        if not _is_integer(seed):
            raise UserInputError(f"GridWalk-v0: env.kwargs.seed must be an integer, not {seed!r}.")
        self.difficulty = Difficulty(size, walls, holes, min_distance, max_turns)
        self.max_turns = max_turns
        self.prompt = prompt
        self.image_size = image_size
        self.seed = seed
        self._grid: Grid | None = None
        self._turn = 0
        self._shortest = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Show grid `options["index"]` of `options["split"]`; a random one without an index."""
        super().reset(seed=seed)
        split, index = self.chosen_item(options)
        self._grid = grid_item(self.difficulty, split, index, self.seed)
        self._shortest = self._grid.distances()[self._grid.agent]
        self._turn = 0
        rules = data.RULES.format(turns=self.max_turns) if self.prompt == "full" else ""
        info = {"index": index, "split": split, "shortest_path": self._shortest}
        return self._show(rules + data.QUESTION), info

    def step(self, action: str) -> StepResult:
        """Make one move."""
        if self._grid is None:
            raise UserInputError("GridWalk-v0: call reset() before step(), and again after an episode has ended.")
        move = parse_move(action)
        self._turn += 1
        grid = self._grid = self._grid if move is None else self._grid.moved(move)
        success, fallen = grid.agent == grid.goal, grid.agent in grid.holes
        out_of_turns = not success and not fallen and self._turn == self.max_turns
        info: Info = {
            "success": success,
            "outcome": "goal" if success else "hole" if fallen else "turns" if out_of_turns else "walking",
            "steps": self._turn,
            "well_formed": move is not None,
            "shortest_path": self._shortest,
        }
        if success or fallen or out_of_turns:
            self._grid = None
            return Observation(), float(success), success or fallen, out_of_turns, info
        return self._show(data.QUESTION if move else data.EXPECTED), 0.0, False, False, info

    def _show(self, text: str) -> Observation:
        assert self._grid is not None
        return Observation.user(picture_of(self._grid, self.image_size), text)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
