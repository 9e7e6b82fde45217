"""curve.png: what is read from a run folder, and that nothing of the figure is cut off."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from rl_vlm.plots import curves as plots
from rl_vlm.plots.curves import Curves, draw_curve, read_curves, smooth
from rl_vlm.types import UserInputError


def run_folder(path: Path, name: str = "my-run", rewards=(0.2, 0.4, 0.9), evaluations=()) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(f"name: {name}\n")
    lines = [f"{number},{value}" for number, value in enumerate(rewards, 1)]
    (path / "progress.csv").write_text("\n".join(["iteration,reward/mean", *lines]) + "\n")
    (path / "eval.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in evaluations))
    return path


def evaluation(iteration: int, value: float, variant: str = "default", **more) -> dict:
    margins = {f"accuracy_low/{variant}": value - 0.1, f"accuracy_high/{variant}": value + 0.1}
    return {"iteration": iteration, f"accuracy/{variant}": value, **margins, **more}


def drawn(curves: Curves) -> tuple[Figure, list[Text]]:
    """The figure, rendered, and its visible texts."""
    figure = Figure(figsize=(9, 5), dpi=100)
    canvas = FigureCanvasAgg(figure)
    plots._draw(figure, curves)
    canvas.draw()
    # Ticks beyond the limits of their axis have labels that are not drawn.
    ticks = [
        (tick, axis) for panel in figure.axes for axis in (panel.xaxis, panel.yaxis) for tick in axis.get_major_ticks()
    ]
    hidden = [tick.label1 for tick, axis in ticks if not _within(tick.get_loc(), axis.get_view_interval())]
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return figure, [text for text in texts if text not in hidden]


def _within(value: float, limits) -> bool:
    return min(limits) <= value <= max(limits)


def test_reward_accuracy_intervals_and_chance_are_read(tmp_path):
    curves = read_curves(
        run_folder(
            tmp_path / "run",
            rewards=("0.2", "", "nan", "0.8"),
            evaluations=[
                evaluation(4, 0.75),
                evaluation(0, 0.25, chance=0.25),
                evaluation(4, 0.875),
                {"iteration": 2, "accuracy/blind": 0.5, "accuracy/default": None},
            ],
        )
    )
    assert curves.name == "my-run"
    assert curves.reward == [(1, 0.2), (4, 0.8)]
    assert curves.accuracy == {"default": [(0, 0.25), (4, 0.875)], "blind": [(2, 0.5)]}
    assert curves.interval["default"] == [(0, 0.15, 0.35), (4, 0.775, 0.975)] and curves.interval["blind"] == []
    assert curves.chance == 0.25


def test_the_figure_says_what_it_shows():
    curves = Curves(
        "my-run", [(1, 0.2), (2, 0.4)], {"default": [(0, 0.25), (2, 0.9)]}, {"default": [(0, 0.2, 0.3)]}, 0.25
    )
    _, texts = drawn(curves)
    said = " ".join(text.get_text() for text in texts)
    for words in ("my-run", "iteration", "reward", "accuracy", "0.25 → 0.90", "95 % interval", "chance 0.25"):
        assert words in said


def test_rewards_on_another_scale_get_a_panel_of_their_own():
    accuracy = {"default": [(0, 0.25)]}
    together, _ = drawn(Curves("a", [(1, 0.0), (2, 1.0)], accuracy, {"default": []}))
    apart, _ = drawn(Curves("a", [(1, -0.5), (2, 3.0)], accuracy, {"default": []}))
    assert len(together.axes) == 1 and len(apart.axes) == 2


@pytest.mark.parametrize("rewards", [(), (0.5,), (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)])
def test_short_runs_are_drawn(tmp_path, rewards):
    assert draw_curve(run_folder(tmp_path / "run", rewards=rewards)).stat().st_size > 10_000


def test_a_missing_folder_and_damaged_files_are_named(tmp_path):
    with pytest.raises(UserInputError, match="no run folder"):
        draw_curve(tmp_path / "missing")
    folder = run_folder(tmp_path / "run", rewards=("zero",))
    with pytest.raises(UserInputError, match="damaged"):
        draw_curve(folder)
    assert not (folder / "curve.png").exists()


def test_smoothing_is_a_gaussian_average():
    values = np.zeros(21)
    values[10] = 1.0
    weights = np.exp(-0.5 * np.arange(-3, 4) ** 2.0)  # width 1 below 40 values
    np.testing.assert_allclose(smooth(values)[7:14], weights / weights.sum())
    noise = np.random.default_rng(0).normal(size=400)
    assert smooth(noise).std() < 0.3 * noise.std()
