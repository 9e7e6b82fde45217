"""The page (Markdown) and the figure of an evaluation, from its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.plots.curves import COLORS, INK, MUTED, new_figure, save_figure, style_panel

_MOST_BARS = 40


@dataclass(frozen=True, slots=True)
class Share:
    """An accuracy with its 95 % interval, and what it is of."""

    name: str
    value: float
    low: float
    high: float
    kind: int = 0  # of the colour: 0 the policy, 1 what it is compared with, 2 a category


def parts_of(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The results by split."""
    return dict(results["splits"]) if "splits" in results else {results["split"]: results}


def variants_of(part: Mapping[str, Any]) -> list[str]:
    """The variants that a split's results have."""
    return [name.removeprefix("accuracy/") for name in part if name.startswith("accuracy/")]


def evaluation_page(results: Mapping[str, Any]) -> str:
    """The results as Markdown: a table of accuracies and rewards, then the tables of what else was measured."""
    adapter = results["adapter"] or "none, the base model"
    lines = [
        f"# Evaluation of {results['model']} on {results['env']}",
        "",
        f"Adapter: {adapter}. Intervals are 95 %: Wilson's for shares, bootstrap for means.",
        "",
    ]
    if results["lost"]:
        lines += [
            f"{results['lost']} items were lost (they count as wrong): the same command with --resume asks them again.",
            "",
            *(f"- {count}: {' '.join(why.split())}" for why, count in results["lost_because"].items()),
            "",
        ]
    for split, part in parts_of(results).items():
        lines += [f"## {split} split", "", *_main_table(part), *_pass_table(part), *_sight_table(part)]
        lines += [*_against_table(part), *_category_tables(part), *_info_tables(part)]
    lines += _throughput(results.get("throughput"))
    return "\n".join(lines).rstrip() + "\n"


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table with a sentence above it; nothing without rows."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in (heads, ["---"] * len(heads), *rows)]
    return [*([title, ""] if title else []), *(f"| {' | '.join(line)} |" for line in cells), ""] if rows else []


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.1f}"


def _range(low: Any, high: Any) -> str:
    return f"{_number(low)} … {_number(high)}"


def _measured(values: Mapping[str, Any], name: str, suffix: str = "") -> list[str]:
    """A value and its interval."""
    low, high = (values.get(f"{name}_{end}{suffix}") for end in ("low", "high"))
    return [_number(values[f"{name}{suffix}"]), _range(low, high)]


def _main_table(part: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            name,
            part[f"items/{name}"],
            *_measured(part, "accuracy", f"/{name}"),
            *_measured(part, "reward", f"/{name}"),
            _number(part[f"turns/{name}"]),
        ]
        for name in variants_of(part)
    ]
    return _table("", ["variant", "items", "accuracy", "interval", "reward", "interval", "turns"], rows)


def _pass_table(part: Mapping[str, Any]) -> list[str]:
    sampled = [(name.removeprefix("pass@"), value) for name, value in part.items() if name.startswith("pass@")]
    rows = [[*name.split("/", 1), _number(value)] for name, value in sampled]
    return _table("Sampled answers:", ["k", "variant", "pass@k"], rows)


def _sight_table(part: Mapping[str, Any]) -> list[str]:
    views = {"blank": "with blank images", "swapped": "with the images of other items"}
    keys = {f"sight/accuracy_{view}": text for view, text in views.items()}
    rows = [[text, _number(part[key])] for key, text in keys.items() if key in part]
    if rows:
        rows.append(["gain of the true over blank images", "{} ({})".format(*_measured(part, "sight/accuracy_gap"))])
    return _table("Does it need to see?", ["first variant", "accuracy"], rows)


def _against_table(part: Mapping[str, Any]) -> list[str]:
    if "against" not in part:
        return []
    rows = [
        [
            name,
            what,
            _number(pair[what]),
            _number(pair[f"{what}_against"]),
            *_measured(pair, f"{what}_difference"),
            f"{pair['p_value']:.3g}" if what == "accuracy" else "",
            pair["items"],
        ]
        for name, pair in part["against"]["variants"].items()
        for what in ("accuracy", "reward")
    ]
    heads = ["variant", "", "policy", "other", "difference", "interval", "p (McNemar, exact)", "items"]
    return _table(f"Against {part['against']['adapter'] or 'the base model'}, on the same items:", heads, rows)


def _category_tables(part: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for variant, categories in part.get("categories", {}).items():
        rows = [
            [name, row["items"], *_measured(row, "accuracy"), _number(row["reward"])]
            for name, row in categories.items()
        ]
        lines += _table(f"By category, {variant}:", ["category", "items", "accuracy", "interval", "reward"], rows)
        if lost := part.get("categories_lost", {}).get(variant):
            lines += [f"Beside these, {lost} items were lost, whose category is not known.", ""]
    return lines


def _info_tables(part: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for variant, names in part.get("info", {}).items():
        rows = [
            [name, row["items"], *(_number(row[key]) for key in ("mean", "p50", "p90"))] for name, row in names.items()
        ]
        title = f"What the environment reports, {variant}:"
        lines += _table(title, ["key", "items", "mean", "p50", "p90"], rows)
    return lines


def _throughput(block: Mapping[str, Any] | None) -> list[str]:
    if not block:
        return []
    rows = [
        [
            batch,
            f"{row['tokens_per_s_mean']:.1f} ± {row['tokens_per_s_std']:.1f}",
            f"{1000 * row['first_token_s']:.1f}",
            f"{row['steady_tokens_per_s']:.1f}",
            f"{row['hf_tokens_per_s_mean']:.1f}" if "hf_tokens_per_s_mean" in row else "–",
            f"{row['ratio']:.2f}" if "ratio" in row else "–",
        ]
        for batch, row in block["batches"].items()
    ]
    heads = ["batch", "tokens/s", "first token (ms)", "steady tokens/s", "transformers tokens/s", "ours / theirs"]
    title = f"{block['runs']} runs of {block['new_tokens']} new tokens, greedy, warmed up."
    return ["## Throughput", "", *_table(title, heads, rows)]


def draw_evaluation(results: Mapping[str, Any], path: Path) -> None:
    """Accuracies with their 95 % intervals: of every split and variant, of the other policy, and of categories."""
    shares = list(_shares(results))[:_MOST_BARS]
    figure = new_figure(9.0, max(2.2, 1.3 + 0.36 * len(shares)))
    panel = figure.subplots()
    style_panel(panel)
    panel.grid(axis="y", visible=False)
    panel.grid(axis="x", color="#e4e7eb", linewidth=0.9)
    for place, share in enumerate(shares):
        color = COLORS[share.kind]
        panel.plot(
            [share.low, share.high], [place, place], color=color, linewidth=2.2, alpha=0.55, solid_capstyle="round"
        )
        panel.plot([share.value], [place], "o", color=color, markersize=7)
        panel.annotate(
            f"{share.value:.2f}", (1.02, place), va="center", fontsize=9.5, color=MUTED, annotation_clip=False
        )
    panel.set_yticks(range(len(shares)), [share.name for share in shares], parse_math=False)
    panel.set_ylim(len(shares) - 0.4, -0.6)
    panel.set_xlim(-0.02, 1.0)
    panel.set_xlabel("accuracy, 95 % interval")
    title = f"{results['model']} on {results['env']}"
    panel.set_title(title, fontsize=13, fontweight="bold", color=INK, loc="left", parse_math=False)
    figure.tight_layout()
    save_figure(figure, [path])


def _shares(results: Mapping[str, Any]) -> Iterator[Share]:
    parts = parts_of(results)
    for split, part in parts.items():
        prefix = f"{split}: " if len(parts) > 1 else ""
        for name in variants_of(part):
            value, low, high = (part[f"{key}/{name}"] for key in ("accuracy", "accuracy_low", "accuracy_high"))
            yield Share(f"{prefix}{name}", value, low, high)
            pair = part.get("against", {}).get("variants", {}).get(name)
            if pair:
                low, high = pair["accuracy_against_low"], pair["accuracy_against_high"]
                yield Share(f"{prefix}{name}, other policy", pair["accuracy_against"], low, high, 1)
            for category, row in part.get("categories", {}).get(name, {}).items():
                yield Share(
                    f"{prefix}{name}, {category}", row["accuracy"], row["accuracy_low"], row["accuracy_high"], 2
                )
