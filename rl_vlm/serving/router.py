"""Which replica a call goes to: the one with its conversation, its caller's home, or the least loaded one."""

from __future__ import annotations

import itertools

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from rl_vlm.config import ServingSection
from rl_vlm.serving.registry import PolicyKey

# No replica id begins with this: ids are letters and digits.
_HOME = "#"


def home_session(place: int) -> str:
    """The session id of new work whose home is the replica at `place` in the order of ids (modulo their number)."""
    return f"{_HOME}{place}"


def homes(key: PolicyKey, caller: int, num_callers: int, serving: ServingSection) -> range:
    """The home replicas of one of a run's callers, spread evenly; every replica serves at least one caller.

    With autoscaling there are homes for the largest number of replicas: places beyond the running ones begin again at
    the first, and a new replica gets requests at once. On shared replicas each caller has one, counted from the
    policy's own home, so that few replicas must load the policy.
    """
    if serving.shared:
        return range(key.home + caller, key.home + caller + 1)
    count = serving.autoscaling.max_replicas if serving.autoscaling else serving.num_replicas
    return range(caller % count, count, num_callers)


class AffinityRouter(FIFOMixin, RequestRouter):
    """The handle's `session_id` is the id of the replica with the conversation, a home (`home_session`), or empty.

    A replica that is gone, or full, falls back to the least loaded one by what this process has in flight and what
    replicas reported; ties go round in turn, so equal calls spread evenly.
    """

    def initialize_state(self, **kwargs: object) -> None:
        """Serve calls this once."""
        self._turn = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
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
