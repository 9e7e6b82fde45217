"""The compact form of log-probabilities is what the tuples were, and three arrays to pickle."""

from __future__ import annotations

import pickle
import random

from rl_vlm.engines.alternatives import Alternatives, packed

random.seed(0)
PLACES = [tuple((random.randrange(1000), -random.random()) for _ in range(k % 4)) for k in range(50)]


def test_it_is_a_sequence_of_the_same_tuples() -> None:
    found = packed(PLACES)
    assert isinstance(found, Alternatives) and len(found) == 50
    assert list(found) == PLACES and found == PLACES and found[7] == PLACES[7] and found[-1] == PLACES[-1]
    assert list(found[3:20:2]) == PLACES[3:20:2] and len(found[50:]) == 0
    assert found != PLACES[:-1] and found != [*PLACES[:-1], ((0, 0.0),)]
    assert packed([]) == () and packed(found) is found
    assert {(type(token), type(value)) for place in found for token, value in place} == {(int, float)}


def test_pickled_it_is_three_arrays() -> None:
    places = [tuple((k, -random.random()) for k in range(20)) for _ in range(500)]
    beside: list[pickle.PickleBuffer] = []  # what Ray copies as it is
    found = pickle.dumps(packed(places), protocol=5, buffer_callback=beside.append)
    assert len(beside) == 3 and len(found) < 2000
    assert sum(buffer.raw().nbytes for buffer in beside) == 500 * 8 + 500 * 20 * (4 + 8)
    assert pickle.loads(found, buffers=beside) == places
