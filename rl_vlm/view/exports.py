"""Kept episodes as a table of Weights & Biases."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from rl_vlm.types import UserInputError
from rl_vlm.view.reader import RunReader
from rl_vlm.view.report import choose_episodes

_FACTS = ("id", "kind", "iteration", "env", "reward", "correct", "status")


def send_wandb(reader: RunReader, project: str, count: int) -> int:
    """Log a table of episodes, a column per picture. Returns how many rows."""
    try:
        import wandb
    except ImportError as error:
        raise UserInputError("wandb is not installed: run `pip install 'rl-vlm[wandb]'`.") from error
    listed, rows = reader.episodes(), []
    for place in choose_episodes(listed, count):
        episode = reader.episode(listed["id"][place])
        parts = [part for message in episode["messages"] for part in message["parts"] if "picture" in part]
        pictures = [wandb.Image(_picture(reader, part["picture"]["sha"])) for part in parts]
        said = [f"[{one['role']}] {' '.join(map(_text_of, one['parts']))}" for one in episode["messages"]]
        rows.append(([listed[name][place] for name in _FACTS], "\n".join(said), pictures))
    most = max((len(pictures) for *_, pictures in rows), default=0)
    columns = [*_FACTS, "conversation", *(f"picture {number + 1}" for number in range(most))]
    data = [[*facts, said, *pictures, *[None] * (most - len(pictures))] for facts, said, pictures in rows]
    with wandb.init(project=project, name=reader.line()["name"], job_type="episodes") as run:
        run.log({"episodes": wandb.Table(columns=columns, data=data)})
    return len(rows)


def _text_of(part: dict[str, Any]) -> str:
    return "(picture)" if "picture" in part else part["call"]["raw"] if "call" in part else next(iter(part.values()))


def _picture(reader: RunReader, sha256: str) -> Image.Image:
    return Image.open(io.BytesIO(reader.file("images", sha256)), formats=("PNG",))
