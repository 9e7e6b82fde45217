"""Routing of generation calls: a conversation stays on its replica, new work goes to the least loaded one."""

from __future__ import annotations

import itertools

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import FIFOMixin, RequestRouter

from rl_vlm.config import ServingSection
from rl_vlm.serving.policy_key import PolicyKey

# No replica id begins with this: ids are letters and digits.
_HOME = "#"


def home_session(place: int) -> str:
    """The session id of new work whose home is the replica at `place` in the order of ids (modulo their number)."""
    return f"{_HOME}{place}"


def most_replicas(serving: ServingSection) -> int:
    """How many replicas there can be at a time."""
    return serving.autoscaling.max_replicas if serving.autoscaling else serving.num_replicas


def homes(caller: int, num_callers: int, num_replicas: int) -> range:
    """The home replicas of one of several callers. Every replica serves at least one caller, and callers are spread evenly.

    With autoscaling `num_replicas` is the most that there can be: places beyond those that run now begin again at the
    first (`AffinityRouter`), and a replica that is added gets its part of the requests at once.
    """
    return range(caller % num_replicas, num_replicas, num_callers)


def homes_of(key: PolicyKey, caller: int, num_callers: int, serving: ServingSection) -> range:
    """The home replicas of one of a run's callers. On shared replicas each caller has one, counted from the policy's own home, so that
    few replicas must load the policy."""
    if not serving.shared:
        return homes(caller, num_callers, most_replicas(serving))
    return range(key.home + caller, key.home + caller + 1)


class AffinityRouter(FIFOMixin, RequestRouter):
    """The handle's `session_id` is the id of the replica that holds the conversation, a home (`home_session`), or empty.

    A replica that is gone, or full, falls back to the least loaded one. Load is what this process has in flight plus
    what replicas reported; ties go round in turn, so equal calls spread evenly.
    """

    def initialize_state(self, **kwargs: object) -> None:
        """Serve calls this once."""
        self._turn = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order in which to try them."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        turn, count = next(self._turn), max(len(candidate_replicas), 1)

        def load(place: int) -> tuple[int, int]:
            known = self.replica_queue_len_cache.get(candidate_replicas[place].replica_id)
            return (known or 0, (place - turn) % count)

        ranked = [candidate_replicas[place] for place in sorted(range(len(candidate_replicas)), key=load)]
        wanted = pending_request.metadata.session_id if pending_request is not None else ""
        if wanted.startswith(_HOME):
            ids = sorted(replica.replica_id.unique_id for replica in candidate_replicas)
            wanted = ids[int(wanted.removeprefix(_HOME)) % count] if ids else ""
        if wanted:
            ranked.sort(key=lambda replica: replica.replica_id.unique_id != wanted)
        return [[replica] for replica in ranked]
