"""Who plays the items of an evaluation: the served model with each side's adapter, or an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rl_vlm.asking.http_endpoints import OpenAIEndpoint
from rl_vlm.config import PolicyConfig
from rl_vlm.config.labels import EndpointSection
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.evaluation.endpoint_player import EndpointPlayer
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.evaluation.outcomes import Outcome, Side, outcomes_of
from rl_vlm.evaluation.play import Play
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.runs.served import Served, served_worker


@dataclass(frozen=True, slots=True)
class Players:
    """The event loop in which all is played, what plays the tasks of a side, and the served model, if there is one.

    Tasks of one side must be finished before the other is asked for.
    """

    runner: asyncio.Runner
    play_as: Callable[[Side], Play]
    served: Served | None = None


@contextmanager
def players(config: PolicyConfig, options: EvaluationOptions, adapters: dict[Side, Path | None]) -> Iterator[Players]:
    """Start what the options name; it ends with the context."""
    if options.endpoint is not None:
        with asyncio.Runner() as runner, _endpoint_player(config, options, options.endpoint, runner) as player:
            yield Players(runner, lambda side: player.play)
        return
    with served_worker(config) as served, asyncio.Runner() as runner:
        yield Players(runner, lambda side: _served_player(config, served, adapters, side), served)


def _served_player(config: PolicyConfig, served: Served, adapters: dict[Side, Path | None], side: Side) -> Play:
    version = 1 + list(adapters).index(side)
    served.publish(adapters[side], version)
    oldest = version if adapters[side] is not None else BASE_MODEL

    async def play(task: RolloutTask) -> list[Outcome] | str:
        result = await served.worker.run([replace(task, min_version=oldest)])
        if not result.groups:
            return next(iter(result.lost.values()))
        return outcomes_of(config, task, result.groups[0].trajectories, side)

    return play


@contextmanager
def _endpoint_player(
    config: PolicyConfig, options: EvaluationOptions, url: str, runner: asyncio.Runner
) -> Iterator[EndpointPlayer]:
    settings = EndpointSection(
        url=url,
        model=options.endpoint_model,
        token_env=options.endpoint_token_env,
        timeout_s=options.endpoint_timeout_s,
        guidance="none",
        logprobs=False,
    )
    client = AsyncExitStack()
    ask = runner.run(client.enter_async_context(OpenAIEndpoint(settings).open()))
    player = EndpointPlayer(config, ask)
    try:
        yield player
    finally:
        player.close()
        runner.run(client.aclose())
