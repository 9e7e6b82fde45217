"""Write the table of docs/memory.md: what `rl-vlm plan --gpus` counts for the recipes for GPUs, on cards of four sizes.

    python docs/memory_table.py

Of the models' folders on the hub it fetches config.json.
"""

from __future__ import annotations

import re
from pathlib import Path

from rl_vlm.config import PolicyConfig, load_config
from rl_vlm.engines.memory import KV
from rl_vlm.learning.memory import OF_UPDATES, recomputed_layers
from rl_vlm.models.memory.shape import GIB
from rl_vlm.runs.memory import make_plan, on_gpus, shape_of
from rl_vlm.runs.memory_plan import MemoryPlan

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/memory.md"
CARDS = (24, 48, 80, 141)  # GB, as sold
PARTS = [(kind, name) for kind in ("replica", "learner") for name in ("weights", "other")]
HEAD = [
    "recipe", "card", "replica: weights", "other", "learner: weights", "other",
    "1 GPU: keys and values", "samples", "update", "kept", "left",
    "2, 4, 8 GPUs: keys and values", "samples", "update", "kept", "left",
]  # fmt: skip
_PLACE = re.compile(r"(<!-- python docs/memory_table.py -->\n\n).*?\n\n", re.DOTALL)


def plan_of(recipe: Path, card: int, gpus: int) -> tuple[MemoryPlan, str]:
    """The plan, and how many layers keep their activations."""
    run = load_config(recipe, [*on_gpus(gpus), f"model.gpu_memory_gib={card}"])
    assert isinstance(run, PolicyConfig) and run.model.least_gpu_gib is not None
    shape = shape_of(run.model.path)
    kept = shape.text.layers - recomputed_layers(run, shape, int(run.model.least_gpu_gib * GIB))
    return make_plan(run, run.model.least_gpu_gib), f"{kept}/{shape.text.layers}"


def sizes(plan: MemoryPlan) -> dict[tuple[str, str], int]:
    """Bytes by process and part, for parts that have no column as `other`."""
    sums: dict[tuple[str, str], int] = {}
    for process in (process for card in plan.cards for process in card.processes):
        for part in process.parts:
            name = "update" if part.name in OF_UPDATES else part.name if part.name in ("weights", KV) else "other"
            sums[process.kind, name] = sums.get((process.kind, name), 0) + part.bytes
    return sums


def row(recipe: Path, card: int) -> list[str] | None:
    """Cells from the card on; None where nothing fits."""
    placed: list[str] = []
    parts: dict[tuple[str, str], int] = {}
    for counts in ((1,), (2, 4, 8)):  # on several each process has a card, and holds the same on all of them
        plans = [plan_of(recipe, card, gpus) for gpus in counts]
        first, kept = plans[0]
        if not first.fits:
            placed += ["–"] * 5
            continue
        parts = sizes(first)
        left = ", ".join(f"{100 * (one.left or 0) / (one.size or 1):.0f} %" for one in first.cards)
        samples = ", ".join(str(plan.samples) for plan, _ in plans)
        placed += [gib(parts["replica", KV]), samples, gib(parts["learner", "update"]), kept, left]
    return [f"{card} GB", *(gib(parts[part]) for part in PARTS), *placed] if parts else None


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def table() -> str:
    """Recipes with equal rows are named together."""
    recipes: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for path in sorted((ROOT / "configs").glob("*_qwen3vl_*.yaml")):
        if getattr(load_config(path), "teacher", None) is not None:
            continue  # who takes a card of its own
        rows = tuple(tuple(cells) for card in CARDS if (cells := row(path, card)))
        recipes.setdefault(rows, []).append(path.stem.replace("_qwen3vl", ""))
    lines = [HEAD, ["---"] * len(HEAD)]
    lines += [[", ".join(names), *cells] for rows, names in recipes.items() for cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """docs/memory.md with the table."""
    return _PLACE.sub(lambda match: f"{match[1]}{table()}\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"Wrote {PAGE.relative_to(ROOT)}.")
