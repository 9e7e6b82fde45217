"""The command line: `rl-vlm train | eval | rollout | serve | label | plot | export | fetch | doctor | envs | model`.

Exit codes: 0 done, 1 failed while running, 2 bad input, 130 and 143 interrupted. Commands import what they need when
they run, so that `rl-vlm --help` is there at once.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rl_vlm.cli import labels as cli_labels
from rl_vlm.cli.errors import ErrorReport, log_to_stderr

if TYPE_CHECKING:
    from rl_vlm.config import RunConfig

app = typer.Typer(
    name="rl-vlm",
    help="Reinforcement learning with vision-language models on Ray.",
    epilog="Start here: rl-vlm doctor, then rl-vlm train configs/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Build models.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(cli_labels.plot_app, name="plot")
app.command(epilog="Example: rl-vlm label pairs/ --goal 'to open the drawer' --model Qwen/Qwen3-VL-8B-Instruct")(
    cli_labels.label
)
app.command(epilog="Example: rl-vlm import-labels cached_labels/Drawer/seed_0 labels --observations 39")(
    cli_labels.import_labels
)

Config = Annotated[Path, typer.Argument(help="A YAML configuration, or a run folder, whose config.yaml is used.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the configuration, such as learner.lr=1e-3 env.kwargs.turns=2.")
]
Adapter = Annotated[Path | None, typer.Option(help="A peft adapter folder. Without it the base model is used.")]
RunDir = Annotated[Path | None, typer.Option(help="A run folder, whose trained adapter (or agent) is used.")]
Out = Annotated[Path | None, typer.Option(help="Write the results to this file as well.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]

_errors = ErrorReport()


def _print_version(asked: bool) -> None:
    if asked:
        from rl_vlm import __version__

        typer.echo(f"rl-vlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: rl-vlm train configs/quickstart.yaml learner.lr=1e-3 --run-dir runs/my-first")
def train(
    config: Config,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the results go; runs/NAME by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the run folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run folder first.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check configuration, model and data; train nothing.")
    ] = False,
) -> None:
    """Train a policy. Ctrl-C saves a checkpoint; --resume goes on from it."""
    from rl_vlm.types import UserInputError

    if resume and overwrite:
        raise UserInputError("--resume and --overwrite contradict each other: give one of them.")
    run = _load(config, overrides)
    from rl_vlm.runs import preflight
    from rl_vlm.runs import train as training

    if dry_run:
        for name, value in preflight.inspect_run(run).items():
            typer.echo(f"{name}: {value}")
        typer.echo(f"{run.name}: nothing is wrong with the configuration, the model and the data.")
        return
    _errors.folder = folder = run_dir or training.default_run_dir(run)
    result = training.train(run, run_dir, resume=resume, overwrite=overwrite)
    typer.echo(_summary(result, folder))
    if result.get("status") != "done":
        raise typer.Exit(1)


@app.command("eval", epilog="Example: rl-vlm eval configs/quickstart.yaml --run-dir runs/quickstart --out eval.json")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    adapter: Adapter = None,
    run_dir: RunDir = None,
    out: Out = None,
) -> None:
    """Measure a policy on the held-out split, or a preference run's agent on its evaluation episodes; print JSON."""
    run = _load(config, overrides)
    source = run_dir or (config if config.is_dir() and adapter is None else None)
    _check_out(out)
    results = run.spec.load("evaluate")(run, adapter=adapter, run_dir=source, out=out)
    typer.echo(json.dumps(results, indent=2))


@app.command(epilog="Example: rl-vlm rollout configs/quickstart.yaml --episodes 8 --temperature 0")
def rollout(
    config: Config,
    overrides: Overrides = None,
    adapter: Adapter = None,
    run_dir: RunDir = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes.")] = 4,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Episodes at the same time.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the configuration's.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens with this share, in (0, 1].")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Per turn.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the configuration's.")] = None,
    out: Out = None,
) -> None:
    """Play episodes and print one JSON line for each, and a summary at the end."""
    run = _load(config, overrides)
    _check_out(out)
    from rl_vlm.models.adapter import find_adapter
    from rl_vlm.runs import evaluate as harness

    options = {
        "batch_size": batch_size,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    sampling = {name: value for name, value in options.items() if value is not None}
    summary = harness.rollout(
        run, adapter=find_adapter(adapter, run_dir), episodes=episodes, sampling=sampling, out=out
    )
    typer.echo(json.dumps({"summary": summary}))


@app.command(epilog="Example: rl-vlm serve tiny http.max_queue=64 --port 8080")
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="tiny, a model folder, a hub name, a YAML configuration or a run folder. LOCAL_MODEL_PATH."
        ),
    ] = None,
    overrides: Overrides = None,
    adapter: Adapter = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1 by default, or SERVER_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 by default, or SERVER_PORT; 0: any free one.")] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's chat completions and /generate. Beyond loopback RL_VLM_API_TOKEN is required."""
    if model is not None and "=" in model and not Path(model).exists():
        overrides = [model, *(overrides or [])]
        model = None  # it comes from LOCAL_MODEL_PATH
    from rl_vlm.models.adapter import find_adapter
    from rl_vlm.runs import serve as launch

    find_adapter(adapter, None)

    planned = launch.plan(model, overrides or (), adapter=adapter, host=host, port=port)
    raise typer.Exit(128 + launch.run_server(planned, typer.echo))


@app.command(epilog="Example: rl-vlm export runs/quickstart my-model")
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_ADAPTER", help="A run folder or a peft adapter folder.")],
    out: Annotated[Path, typer.Argument(help="The Hugging Face model folder to write.")],
    model: Annotated[str | None, typer.Option(help="The base model; by default the one that the run names.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge a trained adapter into its model and write an ordinary Hugging Face folder."""
    from rl_vlm.models.export import export_model
    from rl_vlm.models.loading import quiet_libraries

    quiet_libraries()
    typer.echo(f"Wrote {export_model(source, out, model, overwrite)}: weights, processor and chat template.")


@app.command(epilog="Examples: rl-vlm fetch Qwen/Qwen3-VL-2B-Instruct; rl-vlm fetch hiyouga/geometry3k --data")
def fetch(
    name: Annotated[str, typer.Argument(help="owner/name on the Hugging Face hub.")],
    data: Annotated[bool, typer.Option("--data", help="It is a data set.")] = False,
) -> None:
    """Download a model or a data set once; afterwards everything works offline."""
    from rl_vlm.cli.fetch import fetch as fetch_from_hub

    typer.echo(str(fetch_from_hub(name, data)))


@app.command(epilog="Example: rl-vlm doctor configs/quickstart.yaml")
def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Also look whether this machine is large enough for it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, hardware, rendering, ports, caches; say how to mend what is wrong."""
    from rl_vlm.cli import doctor as checkup

    checks = checkup.diagnose(_load(config, None) if config is not None else None)
    if as_json:
        typer.echo(checkup.as_json(checks))
    else:
        colors = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}
        width = max(len(check.name) for check in checks)
        for check in checks:
            typer.secho(f"{check.status:<5}", fg=colors[check.status], nl=False)
            typer.echo(f"{check.name:<{width}}  {check.detail}")
            if check.remedy:
                typer.echo(f"{'':<{width + 7}}→ {check.remedy}")
    if checkup.worst(checks) == "fail":
        raise typer.Exit(1)


@app.command()
def envs(as_json: AsJson = False) -> None:
    """List the environments that are known by name."""
    from rl_vlm.envs.listing import list_environments

    found = list_environments()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(len(entry["id"]) for entry in found)
    for entry in found:
        items = entry["num_items"]
        counts = f" ({items['train']} items to train on, {items['test']} to test on)" if items else ""
        typer.echo(f"{entry['id']:<{width}}  {entry['description']}{counts}")


@model_app.command("make-tiny", epilog="Example: rl-vlm model make-tiny /tmp/tiny --seed 1")
def make_tiny(
    folder: Annotated[Path | None, typer.Argument(help="Where to write it; the cache by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other weights.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Build the tiny vision-language model, which needs no network. It takes about a minute."""
    from rl_vlm.models.export import check_target, replace_folder
    from rl_vlm.models.loading import quiet_libraries
    from rl_vlm.models.tiny import model as tiny
    from rl_vlm.types import UserInputError

    quiet_libraries()
    if folder is None:
        if overwrite:
            raise UserInputError("--overwrite needs a folder: the model in the cache is always up to date.")
        typer.echo(str(tiny.tiny_model_path(seed=seed)))
        return
    check_target(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        replace_folder(tiny.make_tiny(Path(scratch) / "model", seed=seed), folder)
    typer.echo(str(folder))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point of `rl-vlm`."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors become one sentence on stderr."""
    _errors.folder = None
    log_to_stderr()
    try:
        # Not app(), which would install a traceback printer of its own for the whole process.
        typer.main.get_command(app).main(list(argv) if argv is not None else None, prog_name="rl-vlm")
    except SystemExit as end:
        code = end.code
        return code if isinstance(code, int) else 0 if code is None else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _errors.report(error)
    return 0


def _load(config: Path, overrides: Sequence[str] | None) -> RunConfig:
    from rl_vlm.config import load_config

    return load_config(config / "config.yaml" if config.is_dir() else config, overrides or ())


def _check_out(out: Path | None) -> None:
    """Before an hour of work and not after it."""
    from rl_vlm.types import UserInputError

    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserInputError(f"--out {out} cannot be written: name a file in a folder that exists.")


def _summary(result: dict[str, Any], folder: Path) -> str:
    parts = [f"{result.get('status')} after {result.get('iterations')} {result.get('unit', 'iterations')}"]
    # A preference run's own reward is learned and changes its scale: its evaluation tells how it went.
    reward = "evaluation_reward" if "evaluation_reward_after" in result else "reward"
    for label, name in (("accuracy", "accuracy"), ("reward", reward)):
        before, after = result.get(f"{name}_before"), result.get(f"{name}_after")
        if before is not None and after is not None:
            parts.append(f"{label} {before:.3f} → {after:.3f}")
    return f"{', '.join(parts)}; see {folder / 'curve.png'}"
