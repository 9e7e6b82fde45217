"""Lessons of the tiny model for MiniGrid: pictures of empty rooms, with questions about the objects in them.

Questions about perception (headings, rows, columns, the cell ahead) have right answers. The reply to Control-v0's
question describes rightly the heading and where the goal lies, on the picture and from the agent's view. A random
action word follows: reinforcement learning has to find out which action is good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from rl_vlm.control_envs.gymnasium_env import picture_of
from rl_vlm.types import UserInputError
from rl_vlm.zoo.control.environment import question_of, reminder_of, split_of_start
from rl_vlm.zoo.tiny.teach import Draw, Exchange

Cell = tuple[int, int]  # column and row in the room, from 0, without the walls around it

IMAGE_SIZE = 64
# Pixels per cell as MiniGrid draws them: its default of 32 costs three times as much, and is made smaller anyway.
TILE_SIZE = 8
SIZES = (5, 6)  # cells per side, walls included
WORDS = ("left", "right", "forward")
# MiniGrid's order, and the step of column and row in that direction.
HEADINGS: dict[str, Cell] = {"east": (1, 0), "south": (0, 1), "west": (-1, 0), "north": (0, -1)}
QUESTION, REMINDER = question_of(WORDS), reminder_of(WORDS)
MAX_TURNS = 4
ACTION_SHARE = 0.5  # of the turns

CORPUS = (
    " ".join([QUESTION] * 4),
    REMINDER,
    "left\nright\nforward\n" * 2,
    "north: south east: behind right: left\neast: north west: behind left: right\nsouth: north east: behind left: "
    "forward\n" * 2,
    "west: south west: ahead left: left\neast: north: left: right\nsouth: south: ahead: forward\nwest: east: behind: "
    "left\n" * 2,
    "Heading? What is ahead? wall floor goal Where is goal? Which side? Row of agent? Row of goal? Column of agent? "
    "Column of goal?",
)


@dataclass(frozen=True, slots=True)
class Room:
    """An empty room of `size` × `size` cells, walls included, and where the agent and the goal are."""

    size: int
    agent: Cell
    heading: str
    goal: Cell

    @property
    def ahead(self) -> Cell:
        columns, rows = HEADINGS[self.heading]
        return self.agent[0] + columns, self.agent[1] + rows

    def inside(self, cell: Cell) -> bool:
        return all(0 <= place < self.size - 2 for place in cell)

    def after(self, word: str) -> Room:
        """The state after one of WORDS."""
        if word == "forward":
            return replace(self, agent=self.ahead) if self.inside(self.ahead) else self
        order = tuple(HEADINGS)
        turned = order.index(self.heading) + (1 if word == "right" else -1)
        return replace(self, heading=order[turned % len(order)])


@cache
def render(room: Room) -> np.ndarray:
    """uint8 [IMAGE_SIZE, IMAGE_SIZE, 3]: what Control-v0 shows of the room (`tile_size: 8, image_size: 64`)."""
    env = _empty_room(room.size)
    from minigrid.core.grid import Grid
    from minigrid.core.world_object import Goal

    env.grid = Grid(room.size, room.size)
    env.grid.wall_rect(0, 0, room.size, room.size)
    env.put_obj(Goal(), *(place + 1 for place in room.goal))
    env.agent_pos = tuple(place + 1 for place in room.agent)
    env.agent_dir = tuple(HEADINGS).index(room.heading)
    return picture_of(env.render, IMAGE_SIZE)


def draw_tour(rng: np.random.Generator) -> list[Exchange]:
    """One conversation, a picture in each turn and none of the test split."""
    turns: list[Exchange] = []
    room = random_room(rng)
    for _ in range(int(rng.integers(1, MAX_TURNS + 1))):
        picture = render(room)
        if rng.random() < ACTION_SHARE:
            word = WORDS[rng.integers(len(WORDS))]
            question = QUESTION if rng.random() < 0.95 else REMINDER
            turns.append(Exchange("user", (picture, question), described(room, word)))
            room = room.after(word)
            over = room.agent == room.goal or split_of(room) == "test"
        else:
            question, answer = random_question(rng, room)
            turns.append(Exchange("user", (picture, question), answer))
            over = rng.random() < 0.8
        if over:
            room = random_room(rng)
    return turns


def random_room(rng: np.random.Generator) -> Room:
    """A room of the train split with agent and goal in different cells."""
    while True:
        size = SIZES[rng.integers(len(SIZES))]
        side = size - 2
        agent, goal = (divmod(int(number), side) for number in rng.permutation(side * side)[:2])
        room = Room(size, agent, tuple(HEADINGS)[rng.integers(len(HEADINGS))], goal)
        if split_of(room) == "train":
            return room


def random_question(rng: np.random.Generator, room: Room) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.2:
        return "Heading?", room.heading
    if draw < 0.4:
        return "Where is goal?", bearing(room)
    if draw < 0.5:
        return "Which side?", side(room)
    if draw < 0.6:
        ahead = "goal" if room.ahead == room.goal else "floor" if room.inside(room.ahead) else "wall"
        return "What is ahead?", ahead
    what, cell = ("agent", room.agent) if rng.random() < 0.5 else ("goal", room.goal)
    axis = int(rng.integers(2))
    return f"{('Column', 'Row')[axis]} of {what}?", str(cell[axis] + 1)


def described(room: Room, word: str) -> str:
    """The reply: heading, where the goal is, on which side, action word: "north: south east: behind right: left"."""
    return f"{room.heading}: {bearing(room)}: {side(room)}: {word}"


def bearing(room: Room) -> str:
    """Where on the picture the goal lies, seen from the agent's cell: "north", "south west", ..."""
    columns, rows = _way(room)
    return _two_words(rows, ("north", "south"), columns, ("west", "east"))


def side(room: Room) -> str:
    """Where the goal lies from the agent's view: "ahead", "behind right", ..."""
    columns, rows = _way(room)
    east, south = HEADINGS[room.heading]
    return _two_words(
        east * columns + south * rows, ("behind", "ahead"), east * rows - south * columns, ("left", "right")
    )


def _way(room: Room) -> Cell:
    return room.goal[0] - room.agent[0], room.goal[1] - room.agent[1]


def _two_words(first: int, names: tuple[str, str], second: int, others: tuple[str, str]) -> str:
    """The name of each number that is not 0: of two, the first for a negative one."""
    return " ".join(pair[number > 0] for number, pair in ((first, names), (second, others)) if number)


@cache
def split_of(room: Room) -> str:
    return split_of_start(Image.fromarray(render(room)))


@cache
def _empty_room(size: int) -> Any:
    try:
        import gymnasium
        import minigrid  # noqa: F401  # registers its ids
    except ModuleNotFoundError as error:
        raise UserInputError(
            f"The model tiny-minigrid needs the package {error.name}: run `pip install 'rl-vlm[minigrid]'`."
        ) from error
    env = gymnasium.make(
        "MiniGrid-Empty-Random-6x6-v0", size=size, tile_size=TILE_SIZE, render_mode="rgb_array"
    ).unwrapped
    env.reset(seed=0)
    return env


def drawer(seed: int) -> Draw:
    rng = np.random.default_rng([seed, 5])
    return lambda: draw_tour(rng)
