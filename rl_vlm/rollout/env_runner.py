"""Env runners of vision environments: from tasks to complete groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rl_vlm.config import PolicyConfig
from rl_vlm.envs.errors import describe_error
from rl_vlm.envs.registry import is_agent
from rl_vlm.http.agents import AgentEndpoint
from rl_vlm.models.loading import load_text_side, quiet_libraries
from rl_vlm.rollout.agents import run_agents
from rl_vlm.rollout.base_env_runner import RunEnvRunner
from rl_vlm.rollout.env_pool import EnvPools, GroupFailedError
from rl_vlm.rollout.episodes import OpenGroup, open_group, run_group, viewed_opening
from rl_vlm.rollout.scoring import score_group
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.rollout.teacher import Teacher
from rl_vlm.serving.client import PolicyClient
from rl_vlm.serving.registry import OWN, PolicyKey
from rl_vlm.serving.router import homes
from rl_vlm.tracing import continued, span
from rl_vlm.types import EncodedImage, TrajectoryGroup

# Up to this many tokens per answer a Serve call costs more than waiting for the slowest answer of a batch.
_COALESCE_UP_TO_TOKENS = 128


class RolloutWorker:
    """Samples groups of one run: keeps environments, the chat codec and the client between calls. No RLlib here.

    `place` numbers the `num_workers` workers of the run. `key` opens the run's policy in the application of `run_id`.
    `client` answers in the place of a `PolicyClient`. A `teacher` scores what is sampled to be learned from.
    """

    def __init__(
        self,
        run: PolicyConfig,
        run_id: str,
        model: Path,
        place: int = 0,
        num_workers: int = 1,
        key: PolicyKey = OWN,
        client: Any = None,
        teacher: Teacher | None = None,
    ) -> None:
        self._run, self._run_id, self._key, self._teacher = run, run_id, key, teacher
        self._place, self._num_workers = place, num_workers
        self._text = load_text_side(model, run.model.pixels)
        self._client: Any = client  # PolicyClient, made when it is first needed
        self._rewards = {name: part.reward for name, part in run.env.parts.items() if part.reward.all_weights}
        self.pools = EnvPools(run)
        self._counted_retries = 0  # calls may overlap, and each reports what is new
        self._opened: dict[str, OpenGroup] = {}
        self._is_agent = {name: is_agent(part.id) for name, part in run.env.parts.items()}
        self._endpoint: AgentEndpoint | None = None  # where agents find the policy; made when it is first needed

    async def open_ahead(self, tasks: list[RolloutTask]) -> None:
        """Open the episodes of tasks that will be run next, and let the replicas encode their images: neither needs
        weights that the learner still computes. `run` repeats what fails here."""
        for opened in self._opened.values():  # of a round that was not run
            self.pools.of(opened.task).give_back(opened.envs)
        self._opened = {}
        plain = [task for task in tasks if not self._is_agent[task.env]]
        opening = [open_group(task, self.pools.of(task), self._text) for task in plain]
        outcomes = await asyncio.gather(*opening, return_exceptions=True)
        self._opened = {opened.task.group_id: opened for opened in outcomes if isinstance(opened, OpenGroup)}
        await self._connect().encode_images([opened.prompt.images for opened in self._opened.values()])

    async def run(self, tasks: list[RolloutTask]) -> RolloutResult:
        """Sample all tasks; failures of environments and requests are reported in the result, never raised."""
        started = time.perf_counter()
        client = self._connect()
        dropped: Counter[str] = Counter()
        with continued(tasks[0].trace if tasks else "", f"env_runner-{self._place}") as spans:
            outcomes = await asyncio.gather(*(self._attempt(task, client, dropped) for task in tasks))
        result = RolloutResult(dropped=dict(dropped), retries=client.retries - self._counted_retries, spans=spans)
        self._counted_retries = client.retries
        for task, outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, TrajectoryGroup):
                result.groups.append(outcome)
            else:
                result.lost[task.group_id] = outcome
        share_images(result.groups)
        result.seconds = time.perf_counter() - started
        result.needs_restart = self.pools.stuck
        return result

    def _connect(self) -> PolicyClient:
        if self._client is None:
            serving = self._run.serving
            places = homes(self._key, self._place, self._num_workers, serving)
            self._client = PolicyClient(
                self._run_id,
                deadline_s=serving.request_timeout_s,
                # Lock-step: one call at a time holds all episodes, so that batches repeat exactly.
                homes=places[:1] if self._run.deterministic else places,
                key=self._key,
                coalesce=self._run.deterministic or self._run.rollout.max_new_tokens_per_turn <= _COALESCE_UP_TO_TOKENS,
            )
        return self._client

    async def _attempt(self, task: RolloutTask, client: PolicyClient, dropped: Counter[str]) -> TrajectoryGroup | str:
        """The group, or why it is lost after all its attempts."""
        rollout, max_context = self._run.rollout, self._run.serving.max_context
        opened, why = self._take_opened(task), ""
        for attempt in range(1 + rollout.group_retries):
            try:
                with span("group", group=task.group_id, index=task.index, size=task.size, attempt=attempt):
                    how = self.pools.of(task), client, self._text, rollout, max_context
                    if self._is_agent[task.env]:
                        group = await run_agents(task, self._agents(), *how)
                    else:
                        group = await run_group(task, *how, opened)
                    if task.env in self._rewards:
                        with span("reward"):
                            group = await score_group(group, self._rewards[task.env], client, self._text)
                    if self._teacher is not None and not task.variant:  # of training
                        with span("teach"):
                            group = await self._taught(group, task)
                    return group
            except GroupFailedError as error:
                dropped[error.reason] += 1
                why = str(error)
            except Exception as error:
                dropped["unexpected"] += 1
                why = describe_error(error)
            opened = None
        return why

    async def _taught(self, group: TrajectoryGroup, task: RolloutTask) -> TrajectoryGroup:
        assert self._teacher is not None
        if self._teacher.settings.view != "swapped":
            return await self._teacher.score(group, self._text)
        other = replace(task, view="swapped", other_index=abs(task.index - 1))  # every environment has items 0 and 1
        images = group.trajectories[0].images
        shown = await viewed_opening(images, other, self.pools.of(task))
        return await self._teacher.score(group, self._text, shown)

    def _agents(self) -> AgentEndpoint:
        if self._endpoint is None:
            run = self._run
            limits = {"deadline_s": run.serving.request_timeout_s, "max_queue": 4096,
                      "max_new_tokens": run.rollout.max_new_tokens_per_turn}  # fmt: skip
            self._endpoint = AgentEndpoint(self._text, run.http.model_copy(update=limits), run.serving.max_context)
        return self._endpoint

    def _take_opened(self, task: RolloutTask) -> OpenGroup | None:
        """What `open_ahead` opened for this task."""
        opened = self._opened.pop(task.group_id, None)
        if opened is None or replace(opened.task, min_version=task.min_version, trace=task.trace) == task:
            return opened
        self.pools.of(opened.task).give_back(opened.envs)  # it was opened with other parameters
        return None

    def close_envs(self) -> None:
        self._opened = {}
        if self._endpoint is not None:
            self._endpoint.close()
        self.pools.close()


def share_images(groups: Iterable[TrajectoryGroup]) -> None:
    """Make images with the same bytes one object, which travels to the driver and the learners once."""
    known: dict[str, EncodedImage] = {}
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.images = tuple(known.setdefault(image.sha256, image) for image in trajectory.images)


T = TypeVar("T")


class VLMEnvRunner(RunEnvRunner):
    """An env runner that drives many vision episodes at once with asyncio.

    The loop has a thread of its own: with a policy lag the actor answers several calls at once, one per group. A
    coroutine anywhere in the class would make it an asynchronous actor, whose health checks and calls at lag 0 would
    then share the loop with user code.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        quiet_libraries()
        run: PolicyConfig = self.config.run_config
        num_workers = max(run.rollout.num_env_runners, 1)
        run_id, model, key = self.config.run_id, self.config.model, self.config.policy_key
        assert model is not None  # `PolicyAlgorithmConfig.serve_from` has set it
        folder = model.on_this_node()
        teacher = self._find_teacher(run, num_workers) if self.config.teacher is not None else None
        self._worker = RolloutWorker(run, run_id, folder, self.place, num_workers, key, teacher=teacher)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()

    def _find_teacher(self, run: PolicyConfig, num_workers: int) -> Teacher:
        there, served = self.config.teacher, run.served_teacher
        assert there is not None and run.teacher is not None
        places = homes(OWN, self.place, num_workers, served.serving)
        client = PolicyClient(there.run_id, deadline_s=served.serving.request_timeout_s, homes=places)
        text = load_text_side(there.model.on_this_node(), served.model.pixels)
        return Teacher(run.teacher, client, there.version, text)

    @staticmethod
    def concurrent_calls(run: Any) -> int:
        """One at lag 0; otherwise one per group that is sampled at once, and one for an evaluation beside them."""
        return run.rollout.groups_at_once + 1 if run.rollout.max_policy_lag else 1

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # The driver has the deadline of a call: it restarts this process.
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def sample(self, *, tasks: list[RolloutTask]) -> RolloutResult:
        """Sample all tasks. Failures are data in the result, never exceptions."""
        return self._wait_for(self._worker.run(tasks))

    def open_ahead(self, *, tasks: list[RolloutTask]) -> None:
        self._wait_for(self._worker.open_ahead(tasks))

    def stop(self) -> None:
        self._worker.close_envs()
