"""Which replicas the env runners call home."""

from __future__ import annotations

import pytest

from rl_vlm.serving.router import homes


@pytest.mark.parametrize("callers", range(1, 9))
@pytest.mark.parametrize("replicas", range(1, 9))
def test_every_replica_is_a_home_and_the_load_is_even(callers: int, replicas: int) -> None:
    of_callers = [list(homes(caller, callers, replicas)) for caller in range(callers)]
    assert all(of_callers)  # nobody is without
    seen = [place for places in of_callers for place in places]
    counts = [seen.count(place) for place in range(replicas)]
    assert max(counts) - min(counts) <= 1
    if callers <= replicas:
        assert counts == [1] * replicas
