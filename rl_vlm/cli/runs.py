"""The commands around runs: `rl-vlm train`, `plan`, `export`, `sft`, `sft-example`, `sweep` and `serve`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_vlm.cli.options import Adapter, Config, DeleteFirst, DryRun, NewRunDir, Overrides, Overwrite, Resume, load_run
from rl_vlm.cli.output import error_report, say

FORM = "<answer>{}</answer>"  # of a right answer in `sft-example`

commands = typer.Typer()


@commands.command(epilog="Example: rl-vlm train quickstart learner.lr=1e-3 --run-dir runs/my-first")
def train(
    config: Config,
    overrides: Overrides = None,
    run_dir: NewRunDir = None,
    resume: Resume = False,
    overwrite: DeleteFirst = False,
    dry_run: DryRun = False,
) -> None:
    """Train a policy. Ctrl-C saves a checkpoint; --resume goes on from it."""
    run = load_run(config, overrides)
    folder = _run_folder(run.name, run_dir, config, resume, overwrite)
    from rl_vlm.runs import train as training

    if dry_run:
        obstacles = training.obstacles(run, folder, resume=resume, overwrite=overwrite)
        _print_findings(run.name, lambda: training.inspect_run(run), obstacles)
        return
    _print_result(training.train(run, folder, resume=resume, overwrite=overwrite), folder)


@commands.command(epilog="Example: rl-vlm reproduce quickstart")
def reproduce(
    recipe: Annotated[str, typer.Argument(help="A recipe with a claim, such as quickstart; `list` names them.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between; by default two at random.")] = "",
    run_dir: NewRunDir = None,
) -> None:
    """Train a recipe on two seeds and once with a control that must fail, and say whether it does what is claimed.

    Code 1: it does not. A second call goes on with what is there.
    """
    from rl_vlm.runs import reproduce as reproduction

    if recipe == "list":
        for name, claim in reproduction.claims().items():
            say(f"{name}: {claim.described}")
        return
    folder = Path(run_dir or f"runs/reproduce/{recipe}")
    chosen = reproduction.chosen_seeds(seeds, folder)
    if not reproduction.reproduce(recipe, chosen, folder, say):
        raise typer.Exit(1)


@commands.command(epilog="Example: rl-vlm plan geo3k_qwen3vl_4b --gpu-gib 47.4")
def plan(
    config: Config,
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None, typer.Option(min=1.0, help="Memory of a GPU; else this machine's, else model.gpu_memory_gib.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Place the run on so many GPUs, the faster way, and print the settings.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Print how much memory a run needs on each GPU, part by part, from the model's shapes alone.

    Code 1: it does not fit.
    """
    from rl_vlm.runs.memory import better_in_pairs, describe, make_plan, on_gpus

    run, placement = load_run(config, overrides), list[str]()
    if gpus:
        placement = on_gpus(gpus, gpus > 1 and better_in_pairs(run))
        run = load_run(config, [*placement, *(overrides or ())])
    found = make_plan(run, gpu_gib)
    lines = [*filter(None, [" ".join(placement)]), *describe(run, found)]
    typer.echo(json.dumps(asdict(found), indent=2) if as_json else "\n".join(lines))
    if not found.fits:
        raise typer.Exit(1)


@commands.command(epilog="Example: rl-vlm export runs/quickstart my-model")
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_ADAPTER", help="A run folder, or one of trained weights.")],
    out: Annotated[Path, typer.Argument(help="The Hugging Face model folder to write.")],
    model: Annotated[str | None, typer.Option(help="The base model; by default the one that the run names.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write what a run trained as a Hugging Face folder: its adapter merged into the model, or all weights."""
    from rl_vlm.models.export import export_model
    from rl_vlm.models.loading import quiet_libraries

    quiet_libraries()
    say(f"Wrote {export_model(source, out, model, overwrite)}: weights, processor and chat template.")


@commands.command(epilog="Example: rl-vlm push runs/quickstart me/counts-shapes")
def push(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    repo: Annotated[str, typer.Argument(help="owner/name on the Hugging Face hub; made if it is not there.")],
    merge: Annotated[bool, typer.Option("--merge", help="The whole model in place of the adapter.")] = False,
    public: Annotated[bool, typer.Option("--public", help="For everybody to see, if it is made now.")] = False,
) -> None:
    """Upload what a run trained to the Hugging Face hub, with a card: base, results, settings, how to load it."""
    from rl_vlm.models.loading import quiet_libraries
    from rl_vlm.runs.push import push as push_to_hub

    quiet_libraries()
    say(f"Uploaded to {push_to_hub(run, repo, merge=merge, public=public)}")


def _print_findings(name: str, inspect: Callable[[], Mapping[str, Any]], obstacles: Sequence[str]) -> None:
    """Print what makes a start impossible, then what is found. Exits with 2 where the run would not start."""
    from rl_vlm.types import UserInputError

    for sentence in obstacles:
        say(f"not here: {sentence}")
    heard = BufferingHandler(1000)
    logging.getLogger("rl_vlm").addHandler(heard)
    try:
        for key, value in inspect().items():
            say(f"{key}: {value}")
    except UserInputError as error:
        if str(error) not in obstacles:  # such as a model that is not here
            raise
    finally:
        logging.getLogger("rl_vlm").removeHandler(heard)
    if obstacles:
        say(f"{name}: the run would not start here.")
        raise typer.Exit(2)
    warned = [record for record in heard.buffer if record.levelno >= logging.WARNING]
    but = f" but what {'the warning' if len(warned) == 1 else 'the warnings'} above say{'s' * (len(warned) == 1)}"
    say(f"{name}: nothing is wrong with the configuration, the model and the data{but if warned else ''}.")


def _run_folder(name: str, run_dir: str | None, config: Path, resume: bool, overwrite: bool) -> str:
    """Where results and tracebacks go: what is named, the run folder that is resumed, or runs/NAME."""
    from rl_vlm.types import UserInputError

    if resume and overwrite:
        raise UserInputError("--resume and --overwrite contradict each other: give one of them.")
    folder = run_dir or str(config if resume and config.is_dir() else Path("runs") / name)
    error_report.folder = Path(folder)
    return folder


def _print_result(result: dict[str, Any], folder: str) -> None:
    parts = [f"{result.get('status')} after {result.get('iterations')} {result.get('unit', 'iterations')}"]
    # A preference run's own reward is learned and changes its scale: only its evaluation is comparable over a run.
    reward = "evaluation_reward" if "evaluation_reward_after" in result else "reward"
    for label, name in (("held-out loss", "eval_loss"), ("accuracy", "accuracy"), ("reward", reward)):
        before, after = result.get(f"{name}_before"), result.get(f"{name}_after")
        if after is not None:  # there is no before of a single row
            parts.append(f"{label} {after:.3f}" if before is None else f"{label} {before:.3f} → {after:.3f}")
    say(f"{', '.join(parts)}; see {folder}/curve.png")
    if result.get("status") != "done":
        raise typer.Exit(1)


@commands.command(epilog="Example: rl-vlm sft sft_tiny sft.data=my-data learner.lr=1e-4")
def sft(
    config: Config,
    overrides: Overrides = None,
    run_dir: NewRunDir = None,
    resume: Resume = False,
    overwrite: DeleteFirst = False,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune on conversations with images (LoRA). Ctrl-C saves a checkpoint; --resume goes on from it."""
    from rl_vlm.config import load_sft_config

    job = load_sft_config(config, overrides or ())
    folder = _run_folder(job.name, run_dir, config, resume, overwrite)
    from rl_vlm.runs import sft as tuning

    if dry_run:
        obstacles = tuning.sft_obstacles(job, folder, resume=resume, overwrite=overwrite)
        _print_findings(job.name, lambda: tuning.inspect_sft(job)[0], obstacles)
        return
    _print_result(tuning.sft(job, folder, resume=resume, overwrite=overwrite, progress=say), folder)


@commands.command("sft-example", epilog="Example: rl-vlm sft-example my-data; rl-vlm sft sft_tiny sft.data=my-data")
def sft_example(
    folder: Annotated[Path, typer.Argument(help="The folder to write: new, or empty.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="A configuration, whose environment's items are answered rightly.")
    ] = None,
    form: Annotated[str, typer.Option(help="What an answer looks like, with {} for the right one.")] = FORM,
    count: Annotated[int, typer.Option(min=1, help="Conversations to learn, and a fifth as many to test.")] = 100,
) -> None:
    """Write conversations to fine-tune with: the built-in ones about shapes, as an example of the form that your own
    take, or right answers to the items of your own environment or data."""
    from rl_vlm.supervised.example import write_answers, write_example

    if source is None:
        written = write_example(folder)
    else:
        from rl_vlm.config.loading import of_policy
        from rl_vlm.envs.loading import load_plugins
        from rl_vlm.envs.registry import make

        run = of_policy(load_run(source, None))
        load_plugins(run.plugins)
        part = next(iter(run.env.parts.values()))
        with closing(make(part.id, **part.make_kwargs())) as env:
            written = write_answers(folder, env, form, count, run.rollout.max_turns)
    counts = ", ".join(f"{count} conversations in {split}.jsonl" for split, count in written.items())
    say(f"Wrote {folder}: {counts}.")


@commands.command(epilog="Example: rl-vlm sweep quickstart --space tune/spaces/grpo.yaml")
def sweep(
    config: Config,
    overrides: Overrides = None,
    space: Annotated[Path, typer.Option(help="The YAML file of what varies, see tune/spaces/.")] = ...,  # type: ignore
    run_dir: Annotated[str | None, typer.Option(help="Where the results go; runs/NAME-sweep by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep; nothing is repeated.")] = False,
) -> None:
    """Train with many settings and compare them: a table, a figure, and the best configuration and adapter."""
    from rl_vlm.config.sweep import load_sweep

    run, found = load_run(config, overrides), load_sweep(space)
    from rl_vlm.sweeps.results import report_best
    from rl_vlm.sweeps.sweep import run_sweep, sweep_folder

    folder = sweep_folder(run_dir or Path("runs") / f"{run.name}-sweep")
    trials = run_sweep(run, found, folder, resume=resume)
    report_best(trials, found.metric, folder)
    if not all(trial.finished for trial in trials):
        raise typer.Exit(1)


@commands.command(epilog="Example: rl-vlm serve tiny http.max_queue=64 --port 8080")
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="tiny, a folder, a hub name, a YAML file, a recipe or a run folder; or LOCAL_MODEL_PATH."),
    ] = None,
    overrides: Overrides = None,
    adapter: Adapter = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1 by default, or SERVER_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 by default, or SERVER_PORT; 0: any free one.")] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's chat completions and /generate.

    Beyond loopback RL_VLM_API_TOKEN is required.
    """
    if model is not None and "=" in model and not Path(model).exists():
        overrides = [model, *(overrides or [])]
        model = None  # it comes from LOCAL_MODEL_PATH
    from rl_vlm.runs.signals import leaving_on_signals

    with leaving_on_signals():  # importing takes seconds
        from rl_vlm.runs import serve as launch

        launch.run_server(launch.plan(model, overrides or (), adapter=adapter, host=host, port=port), say)
