"""The page (Markdown) and the figure of an evaluation, from its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_vlm.plots.figures import COLORS, GRID, MUTED, new_figure, save_figure

_MOST_BARS = 40
_VIEWS = {"blank": "with blank images", "swapped": "with the images of other items"}
_THEIRS = (("hf_tokens_per_s_mean", 1), ("ratio", 2))  # keys of the comparison, and digits
Values = Mapping[str, Any]
Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]  # a sentence above it, heads, rows


def _parts(results: Values) -> dict[str, Values]:
    """The results by split."""
    return dict(results["splits"]) if "splits" in results else {results["split"]: results}


def _variants(part: Values) -> list[str]:
    return [name.removeprefix("accuracy/") for name in part if name.startswith("accuracy/")]


def evaluation_page(results: Values) -> str:
    """The results as Markdown."""
    lines = [
        f"# Evaluation of {results['model']} on {results['env']}",
        "",
        f"Adapter: {results['adapter'] or 'none, the base model'}. "
        "Intervals are 95 %: Wilson's for shares, bootstrap for means.",
        "",
    ]
    if results["lost"]:
        lines += [
            f"{results['lost']} items were lost (they count as wrong): the same command with --resume asks them again.",
            "",
            *(f"- {count}: {' '.join(why.split())}" for why, count in results["lost_because"].items()),
            "",
        ]
    for split, part in _parts(results).items():
        lines += [f"## {split} split", ""]
        for table in _tables(part):
            lines += _markdown(*table)
    if "throughput" in results:
        lines += ["## Throughput", "", *_markdown(*_throughput(results["throughput"]))]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table with a sentence above it; nothing without rows."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in (heads, ["---"] * len(heads), *rows)]
    return [*([title, ""] if title else []), *(f"| {' | '.join(line)} |" for line in cells), ""] if rows else []


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.1f}"


def _measured(values: Values, name: str, suffix: str = "") -> str:
    """A value and its interval."""
    value, low, high = (_number(values.get(f"{name}{end}{suffix}")) for end in ("", "_low", "_high"))
    return f"{value} ({low} … {high})"


def _tables(part: Values) -> Iterator[Table]:
    rows: list[list[Any]] = []
    for name in _variants(part):
        accuracy, reward = (_measured(part, what, f"/{name}") for what in ("accuracy", "reward"))
        rows.append([name, part[f"items/{name}"], accuracy, reward, _number(part[f"turns/{name}"])])
    yield "", ["variant", "items", "accuracy", "reward", "turns"], rows
    sampled = [name.removeprefix("pass@").split("/", 1) for name in part if name.startswith("pass@")]
    rows = [[k, name, _number(part[f"pass@{k}/{name}"])] for k, name in sampled]
    yield "Sampled answers:", ["k", "variant", "pass@k"], rows
    keys = {f"sight/accuracy_{view}": text for view, text in _VIEWS.items()}
    rows = [[text, _number(part[key])] for key, text in keys.items() if key in part]
    if rows:
        rows.append(["gain of the true over blank images", _measured(part, "sight/accuracy_gap")])
    yield "Does it need to see?", ["first variant", "accuracy"], rows
    if "against" in part:
        rows = [
            [
                name,
                what,
                *(_number(pair[side]) for side in (what, f"{what}_against")),
                _measured(pair, f"{what}_difference"),
                f"{pair['p_value']:.3g}" if what == "accuracy" else "",
                pair["items"],
            ]
            for name, pair in part["against"]["variants"].items()
            for what in ("accuracy", "reward")
        ]
        heads = ["variant", "", "policy", "other", "difference", "p (McNemar, exact)", "items"]
        yield f"Against {part['against']['adapter'] or 'the base model'}, on the same items:", heads, rows
    for variant, categories in part.get("categories", {}).items():
        rows = [[name, c["items"], _measured(c, "accuracy"), _number(c["reward"])] for name, c in categories.items()]
        yield f"By category, {variant}:", ["category", "items", "accuracy", "reward"], rows
    for variant, names in part.get("info", {}).items():
        heads = ["mean", "p50", "p90"]
        rows = [[name, row["items"], *(_number(row[key]) for key in heads)] for name, row in names.items()]
        yield f"What the environment reports, {variant}:", ["key", "items", *heads], rows


def _throughput(block: Values) -> Table:
    rows = []
    for batch, row in block["batches"].items():
        ours = f"{row['tokens_per_s_mean']:.1f} ± {row['tokens_per_s_std']:.1f}"
        theirs = [f"{row[key]:.{digits}f}" if key in row else "–" for key, digits in _THEIRS]
        rows.append([batch, ours, f"{1000 * row['first_token_s']:.1f}", f"{row['steady_tokens_per_s']:.1f}", *theirs])
    heads = ["batch", "tokens/s", "first token (ms)", "steady tokens/s", "transformers tokens/s", "ours / theirs"]
    return f"{block['runs']} runs of {block['new_tokens']} new tokens, greedy, warmed up.", heads, rows


def draw_evaluation(results: Values, path: Path) -> None:
    """Accuracies with their 95 % intervals: of every split and variant, of the other policy, and of categories."""
    shares = list(_shares(results))[:_MOST_BARS]
    title = f"{results['model']} on {results['env']}"
    figure, (panel,) = new_figure(9.0, max(2.2, 1.3 + 0.36 * len(shares)), title=title)
    panel.grid(axis="y", visible=False)
    panel.grid(axis="x", color=GRID, linewidth=0.9)
    for place, (_, value, low, high, color) in enumerate(shares):
        panel.hlines(place, low, high, color=color, linewidth=2.2, alpha=0.55)
        panel.plot([value], [place], "o", color=color, markersize=7)
        panel.annotate(f"{value:.2f}", (1.02, place), va="center", fontsize=9.5, color=MUTED, annotation_clip=False)
    panel.set_yticks(range(len(shares)), [name for name, *_ in shares], parse_math=False)
    panel.set_ylim(len(shares) - 0.4, -0.6)
    panel.set_xlim(-0.02, 1.0)
    panel.set_xlabel("accuracy, 95 % interval")
    save_figure(figure, [path])


def _shares(results: Values) -> Iterator[tuple[str, float, float, float, str]]:
    """What an accuracy is of, the accuracy, the ends of its interval, and a colour."""

    def share(name: str, values: Values, color: str, key: str = "accuracy", suffix: str = "") -> Any:
        return name, *(values[f"{key}{end}{suffix}"] for end in ("", "_low", "_high")), color

    parts = _parts(results)
    for split, part in parts.items():
        for variant in _variants(part):
            name = f"{split}: {variant}" if len(parts) > 1 else variant
            yield share(name, part, COLORS[0], suffix=f"/{variant}")
            if pair := part.get("against", {}).get("variants", {}).get(variant):
                yield share(f"{name}, other policy", pair, COLORS[1], "accuracy_against")
            for category, row in part.get("categories", {}).get(variant, {}).items():
                yield share(f"{name}, {category}", row, COLORS[2])
