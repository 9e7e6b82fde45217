"""A replica's life: states, what requests meet, and when an engine has to prove itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rl_vlm.serving.follower import Admission, Lifecycle, ReplicaState


def serving() -> Lifecycle:
    life = Lifecycle(probe_after_s=10.0)
    life.started = True
    life.load()
    life.observe(0, now=0.0)
    return life


def test_a_replica_admits_nothing_before_it_has_asked_for_the_newest_adapter() -> None:
    life = Lifecycle(probe_after_s=10.0)
    assert life.state is ReplicaState.STARTING
    assert life.admission is Admission.WAIT
    life.started = True
    assert life.state is ReplicaState.SERVING
    assert life.admission is Admission.NOW


def test_an_engine_proves_itself_only_when_it_has_been_silent() -> None:
    life = serving()
    assert not life.probe_due(9.9)
    assert life.probe_due(10.0)
    life.observe(7, now=9.0)
    assert not life.probe_due(18.9)
    life.observe(7, now=18.9)  # the same count is no progress
    assert life.probe_due(19.0)
    life.pass_probe(now=19.0)
    assert not life.probe_due(28.9)


def test_a_silent_engine_is_suspect_then_dead() -> None:
    life = serving()
    life.fail_probe("no token within 5 s")
    assert life.state is ReplicaState.SUSPECT
    assert life.admission is Admission.ELSEWHERE
    assert life.probe_due(0.0)  # at once, whatever it produced before
    life.fail_probe("no token within 5 s")
    assert life.state is ReplicaState.DEAD
    assert life.death == "no token within 5 s (2 times in a row)"
    assert not life.probe_due(1e9)


@pytest.mark.parametrize("recovery", ["probe", "progress"])
def test_a_suspect_that_produces_again_is_trusted_again(recovery: str) -> None:
    life = serving()
    life.fail_probe("slow")
    if recovery == "probe":
        life.pass_probe(now=5.0)
    else:
        life.observe(1, now=5.0)
    assert life.state is ReplicaState.SERVING
    life.fail_probe("slow")
    assert life.state is ReplicaState.SUSPECT  # failures in a row count, not in a lifetime


def test_a_first_load_that_fails_does_not_leave_it_starting_for_ever() -> None:
    life = Lifecycle(probe_after_s=10.0, load_patience_s=30.0)
    life.fail_load("out of memory", now=5.0)
    assert (life.state, life.admission) == (ReplicaState.STARTING, Admission.ELSEWHERE)
    life.fail_load("out of memory", now=34.9)
    assert life.state is ReplicaState.STARTING
    life.fail_load("out of memory", now=35.0)
    assert (life.state, life.death) == (ReplicaState.DEAD, "out of memory")


def test_patience_begins_anew_after_a_success_and_has_no_end_for_an_adapter_that_is_wrong() -> None:
    life = Lifecycle(probe_after_s=10.0, load_patience_s=30.0)
    life.started = True
    life.fail_load("no space left", now=0.0)
    life.load()
    life.fail_load("no space left", now=100.0)
    assert life.state is not ReplicaState.DEAD
    life.fail_load("does not fit the model", now=1000.0, curable=False)
    assert life.state is not ReplicaState.DEAD
    life.load()
    for now in (1100.0, 1200.0):  # an adapter that is wrong does not begin the time in which others may fail
        life.fail_load("does not fit the model", now=now, curable=False)
    life.fail_load("no space left", now=1201.0)
    assert life.state is not ReplicaState.DEAD


def test_death_is_final_and_keeps_its_first_reason() -> None:
    life = serving()
    life.die("the engine core has died")
    life.die("something else")
    for event in (life.load, lambda: life.pass_probe(1.0), lambda: life.observe(99, 1.0)):
        event()
        assert life.state is ReplicaState.DEAD
    assert life.death == "the engine core has died"
    assert life.admission is Admission.ELSEWHERE


def test_whatever_happens_no_request_is_admitted_before_the_start_or_to_a_silent_engine() -> None:
    """Random walks over all events."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        life = Lifecycle(probe_after_s=5.0, max_failed_probes=3)
        now = 0.0
        for _ in range(60):
            now += float(rng.uniform(0, 3))
            events: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
                (setattr, (life, "started", True)),
                (life.load, ()),
                (life.observe, (int(now), now)),
                (life.pass_probe, (now,)),
                (life.fail_probe, ("slow",)),
            ]
            # Failures are rarer than the rest, or every walk would end at once.
            event, arguments = events[rng.integers(0, len(events) - (rng.random() < 0.7))]
            event(*arguments)
            if life.admission is Admission.NOW:
                assert life.started and not life.death and not life.failed_probes
            if life.admission is Admission.WAIT:
                assert not life.death
