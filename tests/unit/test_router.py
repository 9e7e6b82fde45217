"""Which replicas the env runners call home."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.config import AutoscalingSection, ServingSection
from rl_vlm.serving.client import AffinityRouter, home_session, homes
from rl_vlm.serving.registry import OWN


@pytest.mark.parametrize("callers", range(1, 9))
@pytest.mark.parametrize("replicas", range(1, 9))
def test_every_replica_is_a_home_and_the_load_is_even(callers: int, replicas: int) -> None:
    of_callers = [list(homes(OWN, caller, callers, ServingSection(num_replicas=replicas))) for caller in range(callers)]
    assert all(of_callers)  # nobody is without
    seen = [place for places in of_callers for place in places]
    counts = [seen.count(place) for place in range(replicas)]
    assert max(counts) - min(counts) <= 1
    if callers <= replicas:
        assert counts == [1] * replicas


@pytest.mark.parametrize("callers", [1, 2, 3])
@pytest.mark.parametrize("running", range(1, 5))
def test_replicas_that_autoscaling_adds_get_their_part_of_the_requests(callers: int, running: int) -> None:
    """The router sends a home's requests to the replica at that place, modulo the replicas that run."""
    serving = ServingSection(num_replicas=1, autoscaling=AutoscalingSection(max_replicas=4))
    candidates = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"replica{k}")) for k in range(running)]
    state: Any = SimpleNamespace(_turn=itertools.count(), replica_queue_len_cache=SimpleNamespace(get=lambda _: 0))

    def first_choice(place: int) -> str:
        request: Any = SimpleNamespace(
            routing_context=SimpleNamespace(), metadata=SimpleNamespace(session_id=home_session(place))
        )
        ranked = asyncio.run(AffinityRouter.choose_replicas(state, candidates, request))  # type: ignore[arg-type]
        return ranked[0][0].replica_id.unique_id

    places = [place for caller in range(callers) for place in homes(OWN, caller, callers, serving)]
    assert {first_choice(place) for place in places} == {replica.replica_id.unique_id for replica in candidates}
