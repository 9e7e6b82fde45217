"""GridWalk-v0: walk over a drawn grid to the goal, one move a turn; the reward comes at the end.

A small task in which credit matters: several turns decide about one number, and states come back.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.types import Observation, UserInputError
from rl_vlm.zoo.gridwalk.grids import IMAGE_SIZE, MOVES, Difficulty, grid_item, picture_of

MIN_SIZE, MAX_SIZE = 3, 6

# The first message of prompt "full"; the question follows.
RULES = (
    "You are the red disc. Walk to the green square. White cells are walls, which stop you; black discs are holes: if "
    "you step on one, the game is lost. In each of at most {turns} turns end your answer with one word: up, down, left "
    "or right. "
)
QUESTION = "Which way?"
EXPECTED = "End with up, down, left or right."


MIN_TURNS, MAX_TURNS = 2, 10
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 64, 1024


def parse_move(text: str) -> str | None:
    """The move, if the last word is one of the four; None otherwise. What stands before it is the policy's thinking."""
    words = text.strip().removesuffix(".").lower().split()
    return words[-1] if words and words[-1] in MOVES else None


class GridWalkEnv(EpisodeEnv):
    """Walk to the goal of a drawn grid around walls and holes: one move (up, down, left or right) a turn.

    size: cells per side. walls, holes: how many; walls stop the agent, a hole ends the episode. min_distance: steps of
    the shortest path at least; every grid can be solved in `max_turns`. prompt: "brief" asks in three words, for the
    tiny model. image_size: pixels per side. seed: which set of grids.

    The reward is 1 at the goal and 0 otherwise. An answer that names no move gets a reminder and still costs a turn.
    `info` holds `success`, `outcome` ("goal", "hole", "turns" or "walking"), `steps` (turns used), `well_formed`, and
    `shortest_path` (steps from the start).
    """

    name = "GridWalk-v0"

    def __init__(
        self,
        size: Annotated[int, Field(ge=MIN_SIZE, le=MAX_SIZE)] = 4,
        *,
        walls: Annotated[int, Field(ge=0)] = 2,
        holes: Annotated[int, Field(ge=0)] = 2,
        max_turns: Annotated[int, Field(ge=MIN_TURNS, le=MAX_TURNS)] = 8,
        min_distance: Count = 3,
        prompt: Literal["full", "brief"] = "full",
        image_size: Annotated[int, Field(ge=MIN_IMAGE_SIZE, le=MAX_IMAGE_SIZE)] = IMAGE_SIZE,
        seed: int = 0,
        num_train: Count = 4096,
        num_test: Count = 512,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns)
        if walls + holes > size * size - 2:
            raise UserInputError(
                f"GridWalk-v0: env.kwargs.walls ({walls}) and holes ({holes}) leave no room for agent and goal in "
                f"{size}×{size} cells: lower one, or raise size."
            )
        if min_distance > max_turns:
            raise UserInputError(
                "GridWalk-v0: env.kwargs.min_distance must be an integer from 1 to env.kwargs.max_turns "
                f"({max_turns}), not {min_distance!r}."
            )
        self.difficulty = Difficulty(size, walls, holes, min_distance, max_turns)
        self.prompt = prompt
        self.image_size = image_size
        self.seed = seed

    def open(self, item: Item) -> tuple[Observation, Info]:
        self._grid = grid_item(self.difficulty, item.split, item.index, self.seed)
        self._shortest = self._grid.distances()[self._grid.agent]
        rules = RULES.format(turns=self.max_turns) if self.prompt == "full" else ""
        return self._show(rules + QUESTION), {"shortest_path": self._shortest}

    def reply(self, text: str) -> Reply:
        move = parse_move(text)
        grid = self._grid = self._grid if move is None else self._grid.moved(move)
        success, fallen = grid.agent == grid.goal, grid.agent in grid.holes
        out_of_turns = not success and not fallen and self.is_last_turn
        info: Info = {
            "success": success,
            "outcome": "goal" if success else "hole" if fallen else "turns" if out_of_turns else "walking",
            "steps": self.turn, "well_formed": move is not None, "shortest_path": self._shortest,
        }  # fmt: skip
        if success or fallen:
            return Reply(float(success), None, info)
        return Reply(0.0, self._show(QUESTION if move else EXPECTED), info)

    def _show(self, text: str) -> Observation:
        return Observation.user(picture_of(self._grid, self.image_size), text)
