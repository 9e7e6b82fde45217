"""The commands around labels: `rl-vlm label`, `rl-vlm import-labels` and `rl-vlm plot`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from rl_vlm.cli.options import Overwrite
from rl_vlm.cli.output import say

commands = typer.Typer()
plot_commands = typer.Typer(help="Draw figures from files of runs, RL-VLM-F's included.", no_args_is_help=True)
commands.add_typer(plot_commands, name="plot")

Outputs = Annotated[
    list[Path] | None, typer.Option("--out", "--output", help="A .png, .svg or .pdf file; may be given several times.")
]
LabelKind = Literal["pairs", "scores", "ratings", "progress"]
_SCALES = {"scores": "number", "ratings": "rating", "progress": "success"}  # of preference.labels.scale
Title = Annotated[str, typer.Option(help="Above the figure.")]


@commands.command(epilog="Example: rl-vlm label pairs/ --goal 'to open the drawer' --endpoint http://127.0.0.1:8000/v1")
def label(
    folder: Annotated[
        Path, typer.Argument(help="Pictures first_X, second_X (X_1, X_2), a pairs.csv, or a label store.")
    ],
    task: Annotated[str | None, typer.Option(help="A task whose prompts are known, such as drawer-open.")] = None,
    goal: Annotated[str | None, typer.Option(help="The goal in words, such as 'to open the drawer'.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A YAML file of own prompts.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="The base URL of an OpenAI-compatible server, such as that of rl-vlm serve.")
    ] = None,
    endpoint_model: Annotated[str, typer.Option(help="The model's name at the endpoint.")] = "default",
    generate: Annotated[str | None, typer.Option(help="The URL of a plain /generate server.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=2, help="1: the label at once. 2: describe, then summarise.")] = 2,
    no_logprobs: Annotated[
        bool, typer.Option("--no-logprobs", help="Do not ask the endpoint for log-probabilities, which some reject.")
    ] = False,
    kind: Annotated[
        LabelKind,
        typer.Option(help="pairs: which of two? Of each picture scores, ratings (words), progress (is it done?)."),
    ] = "pairs",
    compare: Annotated[
        str, typer.Option(metavar="KINDS", help="Label with several kinds, such as pairs,ratings, and print a table.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The CSV to write; FOLDER/vlm_query_log.csv by default.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Label a folder of picture pairs: which is nearer to the goal? Writes a CSV and prints a summary as JSON."""
    from rl_vlm.config import EndpointSection, LabelsSection
    from rl_vlm.labelling.building import build_labeller
    from rl_vlm.labelling.folder import comparison, label_folder
    from rl_vlm.labelling.labeller import ScoredPairs
    from rl_vlm.labelling.query_log import FILE_NAME
    from rl_vlm.types import UserInputError

    if bool(endpoint) == bool(generate):
        raise UserInputError("Say who labels: give one of --endpoint and --generate.")
    if not (task or goal):
        raise UserInputError("Say what is to be achieved: --goal 'to open the drawer', or --task drawer-open.")
    kinds = [one.strip() for one in compare.split(",") if one.strip()] or [kind]
    if unknown := [one for one in kinds if one not in get_args(LabelKind)]:
        raise UserInputError(f"--compare {unknown[0]}: give some of {', '.join(get_args(LabelKind))}.")
    target = out or folder / FILE_NAME
    targets = {one: target.with_stem(f"{target.stem}_{one}") if compare else target for one in kinds}
    if there := [path for path in targets.values() if path.exists() and not overwrite]:
        raise UserInputError(f"{there[0]} exists already: add --overwrite or choose another --out.")
    section = LabelsSection(
        source="endpoint" if endpoint else "generate",
        task=task,
        goal=goal,
        prompts=str(prompts) if prompts else None,
        steps=1 if steps == 1 else 2,
        endpoint=EndpointSection(url=endpoint or generate or "", model=endpoint_model, logprobs=not no_logprobs),
    )
    summaries = {}
    for one, file in targets.items():
        labeller = build_labeller(section.model_copy(update={"scale": _SCALES.get(one, section.scale)}))
        summaries[one] = label_folder(folder, labeller if one == "pairs" else ScoredPairs(labeller), file)
        if summaries[one]["errors"] == summaries[one]["pairs"]:
            file.unlink()  # it holds the error alone, and would stand in the way of the next try
            say(json.dumps(summaries[one], indent=2))
            raise typer.Exit(1)
    say(comparison(summaries) if compare else json.dumps(summaries[kind], indent=2))


@commands.command(epilog="Example: rl-vlm import-labels cached_labels/Drawer/seed_0 labels --observations 39")
def import_labels(
    source: Annotated[Path, typer.Argument(help="A folder of RL-VLM-F's .pkl label caches, or one of them.")],
    target: Annotated[Path, typer.Argument(help="The label store to write.")],
    observations: Annotated[int, typer.Option(min=1, help="Numbers in an observation; the actions follow them.")],
    image_size: Annotated[int | None, typer.Option(min=8, help="Resize the pictures to this many pixels.")] = None,
) -> None:
    """Convert RL-VLM-F's label caches. Pickles may run code: this reader takes plain arrays and rejects all else."""
    from rl_vlm.labelling.import_labels import import_labels as convert

    sessions, pairs = convert(source, target, observation_size=observations, image_size=image_size)
    say(f"Wrote {pairs} pairs of {sessions} sessions to {target}; use it as preference.labels.cache={target}")


@plot_commands.command(
    "learning-curve", epilog="Example: rl-vlm plot learning-curve vlm=runs/a vlm=runs/b teacher=runs/c"
)
def learning_curve(
    runs: Annotated[
        list[str], typer.Argument(help="Run folders or eval.csv files. NAME=PATH puts runs of one NAME into one curve.")
    ],
    out: Outputs = None,
    window: Annotated[
        int, typer.Option("--window", "--smooth-window", min=1, help="Evaluations in the trailing mean; 1: none.")
    ] = 5,
    title: Title = "",
    column: Annotated[str | None, typer.Option(help="What is drawn; success_rate, else true_episode_reward.")] = None,
    unit: Annotated[
        Literal["percent", "fraction"] | None,
        typer.Option(help="Of success rates in other files than ours; by default percent where one is above 1."),
    ] = None,
) -> None:
    """Success rate, or return, over environment steps; mean and 95 % interval where a curve has several runs."""
    from rl_vlm.plots.curves import DEFAULT_FILE, draw_learning_curve

    kinds: dict[str, list[str]] = {}
    for run in runs:
        name, separator, path = run.partition("=")
        # A path may hold an equals sign itself.
        named = bool(separator) and not Path(run).exists()
        place = Path(run).resolve()
        own_name = place.parent.name if place.suffix else place.name
        kinds.setdefault(name if named else own_name, []).append(path if named else run)
    outputs = out or [Path(DEFAULT_FILE)]
    bands = draw_learning_curve(kinds, outputs, window=window, title=title, column=column, unit=unit)
    smoothed = f" (trailing mean of {window} evaluations)" if window > 1 else ""
    for name, band in bands.items():
        say(f"{name}: {band.mean[-1]:.3f} at step {band.steps[-1]:.0f}{smoothed}, {band.runs} run(s)")
    say(f"Wrote {', '.join(map(str, outputs))}")


@plot_commands.command("label-accuracy", epilog="Example: rl-vlm plot label-accuracy runs/a --out accuracy.svg")
def label_accuracy(
    logs: Annotated[list[Path], typer.Argument(help="Run folders or vlm_query_log.csv files, counted together.")],
    out: Outputs = None,
    bins: Annotated[int, typer.Option("--bins", "--num-bins", min=1, help="Bins of the difference of returns.")] = 10,
    title: Title = "",
) -> None:
    """How often labels are right, wrong or undecided, by how far apart the true returns are."""
    from rl_vlm.files import to_jsonable
    from rl_vlm.plots.label_accuracy import DEFAULT_FILE, draw_label_accuracy

    outputs = out or [Path(DEFAULT_FILE)]
    # Without a decided label there is no accuracy, and JSON has no NaN.
    say(json.dumps(to_jsonable(draw_label_accuracy(logs, outputs, bins=bins, title=title)), indent=2))
    say(f"Wrote {', '.join(map(str, outputs))}", err=True)
