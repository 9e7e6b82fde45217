"""The commands that measure: `rl-vlm eval` and `rl-vlm rollout`."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_vlm.cli.options import Adapter, Overrides, load_run
from rl_vlm.cli.output import say

if TYPE_CHECKING:
    from rl_vlm.types import Trajectory

commands = typer.Typer()


class SplitName(enum.StrEnum):
    """The splits by name: typer knows no list of literals."""

    TRAIN = "train"
    TEST = "test"


MaybeConfig = Annotated[
    Path | None,
    typer.Argument(
        help="A YAML file, a recipe's name, or a run folder, whose config.yaml and policy are used; without it, give "
        "--model and --env."
    ),
]
RunDir = Annotated[Path | None, typer.Option(help="A run folder, whose trained adapter (or agent) is used.")]
Model = Annotated[str | None, typer.Option(help="model.path: `tiny`, a Hugging Face folder, or a fetched hub name.")]
Env = Annotated[str | None, typer.Option(help="env.id: a registry id, package.module:Class, or path/to/env.py.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Per turn; above rollout.max_new_tokens that grows, too.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results that --out holds.")]
_EXAMPLE = "Example: rl-vlm eval quickstart --run-dir runs/quickstart --against base --out eval.json"


@commands.command("eval", epilog=_EXAMPLE)
def evaluate(
    config: MaybeConfig = None,
    overrides: Overrides = None,
    adapter: Adapter = None,
    run_dir: RunDir = None,
    blind: Annotated[
        bool,
        typer.Option("--blind", help="Also with blank images, and with those of other items: does it need to see?"),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write results.json; beside it the items (.items.jsonl), a page (.md) and a figure (.png)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Ask only what the items file beside --out lacks.")] = False,
    overwrite: Overwrite = False,
    against: Annotated[
        str | None, typer.Option(help="Compare on the same items with `base`, a run folder or an adapter folder.")
    ] = None,
    split: Annotated[
        list[SplitName] | None, typer.Option(help="Several are possible. Default: the configuration's.")
    ] = None,
    benchmark_runs: Annotated[
        int, typer.Option(min=0, help="Also measure tokens per second and the time to the first token, so many times.")
    ] = 0,
    compare_hf: Annotated[
        bool, typer.Option("--compare-hf", help="The same prompts with plain transformers, and ours over theirs.")
    ] = False,
    endpoint: Annotated[
        str | None, typer.Option(help="Measure an OpenAI-compatible server, such as http://host:8000/v1. Needs no Ray.")
    ] = None,
    endpoint_model: Annotated[str, typer.Option(help="The model's name there.")] = "default",
    endpoint_token_env: Annotated[
        str, typer.Option(help="The environment variable that holds the server's token, if it needs one.")
    ] = "RL_VLM_ENDPOINT_TOKEN",
    endpoint_timeout_s: Annotated[float, typer.Option(min=1, help="Of one request to the server.")] = 120.0,
    model: Model = None,
    env: Env = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="evaluation.num_items.")] = None,
    max_new_tokens: MaxNewTokens = None,
) -> None:
    """Measure a policy on the held-out split, or a preference run's agent on its evaluation episodes; print JSON."""
    config = config or (None if model else run_dir)
    changes = {
        "model.path": model,
        "env.id": env,
        "evaluation.num_items": episodes,
        "rollout.max_new_tokens_per_turn": max_new_tokens,
    }
    run = _load(config, overrides, changes, needs=("env",) if endpoint else ("model", "env"))
    if max_new_tokens is not None:
        run = run.model_copy(update={"rollout": run.rollout.with_turns_of(max_new_tokens)})
    source = run_dir if endpoint else _source(config, adapter, run_dir)
    _check_out(out, resume, overwrite)
    from rl_vlm.config import EndpointSection
    from rl_vlm.evaluation.heldout import EvaluationOptions
    from rl_vlm.runs.train import evaluate_run

    access = {"model": endpoint_model, "token_env": endpoint_token_env, "timeout_s": endpoint_timeout_s}
    server = None if endpoint is None else EndpointSection(url=endpoint, logprobs=False, **access)
    options = EvaluationOptions(
        blind=blind,
        resume=resume,
        overwrite=overwrite,
        against=against,
        split=tuple(dict.fromkeys(name.value for name in split or ())),
        benchmark_runs=benchmark_runs,
        compare_hf=compare_hf,
        endpoint=server,
    )
    results = evaluate_run(run, adapter=adapter, run_dir=source, out=out, options=options)
    say(json.dumps(results, indent=2))


@commands.command(epilog="Example: rl-vlm rollout --model tiny --env Shapes-v0 --episodes 8 --temperature 0")
def rollout(
    config: MaybeConfig = None,
    overrides: Overrides = None,
    adapter: Adapter = None,
    run_dir: RunDir = None,
    model: Model = None,
    env: Env = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes.")] = 4,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Episodes at the same time. Default: all.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the configuration's.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens with this share, in (0, 1].")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the configuration's.")] = None,
    min_pixels: Annotated[int | None, typer.Option(min=1, help="Smaller images are enlarged to this.")] = None,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Larger images are reduced to this.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the lines to this file instead.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print conversations with their pictures.")] = False,
    keep: Annotated[Path | None, typer.Option(help="A new folder: good episodes as data for `rl-vlm sft`.")] = None,
    least: Annotated[float, typer.Option(help="The reward of an episode that --keep writes.")] = 1.0,
    overwrite: Overwrite = False,
) -> None:
    """Play episodes and print one JSON line for each, and a summary at the end."""
    from rl_vlm.config import of_policy

    changes = {"model.path": model, "env.id": env, "model.min_pixels": min_pixels, "model.max_pixels": max_pixels}
    config = config or (None if model else run_dir)
    run = of_policy(_load(config, overrides, changes, needs=("model", "env"), models=("sft", "preference")))
    _check_out(out, overwrite=overwrite)
    from rl_vlm.models.trained import find_trained
    from rl_vlm.runs import play
    from rl_vlm.types import UserInputError

    options: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": max_new_tokens, "seed": seed}
    options |= {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling = {name: value for name, value in options.items() if value is not None}
    if keep is not None and keep.exists():
        raise UserInputError(f"{keep} exists already: choose a new folder for --keep.")
    if top_p is not None and not 0 < top_p <= 1:  # before a model loads
        raise UserInputError(f"--top-p is {top_p}: it must be above 0 and at most 1.")
    source = _source(config, adapter, run_dir)
    has_none = source is not None and (source / "config.yaml").is_file() and "preference" in _sections(source)
    trained = find_trained(adapter, None if has_none else source)
    chosen: dict[str, Any] = {"out": out, "show": _show if show else None, "keep": keep, "least": least}
    summary = play.rollout(run, adapter=trained, episodes=episodes, sampling=sampling, **chosen)
    say(json.dumps({"summary": summary}))


def _show(trajectory: Trajectory) -> None:
    from rich.console import Console

    from rl_vlm.cli.conversation import print_line, print_messages

    console = Console(highlight=False)
    print_line(console, f"\n{trajectory.trajectory_id}: reward {trajectory.reward:.4g}, {trajectory.status}", "bold")
    print_messages(console, trajectory.messages)


def _source(config: Path | None, adapter: Path | None, run_dir: Path | None) -> Path | None:
    """The run folder whose policy is meant: the one that is named, or the one that stands for its configuration."""
    return run_dir or (config if config is not None and config.is_dir() and adapter is None else None)


def _sections(run_dir: Path) -> dict[str, Any]:
    from rl_vlm.config.loading import find_config, read_yaml

    return read_yaml(find_config(run_dir), ())


def _load(
    config: Path | None,
    overrides: list[str] | None,
    changes: dict[str, Any],
    needs: tuple[str, ...],
    models: tuple[str, ...] = ("sft",),
) -> Any:
    """The run of a configuration, of flags alone, or of both; flags win. Flags alone must hold those of `needs`. Of a
    run folder with a section of `models` only the model counts."""
    from rl_vlm.config import load_served_config
    from rl_vlm.types import UserInputError

    words = list(overrides or ())
    if config is not None and "=" in str(config) and not config.exists():
        words.insert(0, str(config))  # the first change, where there is no configuration
        config = None
    flags = {"model": "model.path", "env": "env.id"}
    missing = [f"--{name}" for name in needs if config is None and changes[flags[name]] is None]
    if missing:
        raise UserInputError(f"Name a configuration or a run folder, or give {' and '.join(missing)}.")
    words += [f"{key}={json.dumps(value)}" for key, value in changes.items() if value is not None]
    if config is None or not config.is_dir() or not set(models) & set(_sections(config)):
        return load_run(config, words)
    if not any(word.startswith("env.") for word in words):
        raise UserInputError(f"The run in {config} has a model and no environment: add one, such as --env Shapes-v0.")
    return load_served_config(config / "config.yaml", words)


def _check_out(out: Path | None, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse an output file that cannot be written, or whose content would be lost, before the work starts."""
    from rl_vlm.types import UserInputError

    if out is None and resume:
        raise UserInputError("--resume goes on from the items file beside --out: give the --out of the former command.")
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UserInputError(f"--out {out} cannot be written: name a file in a folder that exists.")
    if out is not None and out.exists() and not (resume or overwrite):
        raise UserInputError(f"--out {out} exists: choose another file, or add --overwrite.")
