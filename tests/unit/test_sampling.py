"""Choosing tokens: against an independent implementation, in distribution, and at the edges of [0, 1)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl_vlm.engines.rows import choose_tokens
from rl_vlm.numerics import derive_seed, splitmix64, uniforms

LARGEST = 1.0 - 2.0**-53  # the largest number that `uniforms` gives


def choose(
    logits: np.ndarray,
    uniform: np.ndarray,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`choose_tokens` with the same parameters for all rows of logits [R, V]."""
    rows = len(uniform)
    tokens, logprobs, _ = choose_tokens(
        torch.tensor(logits, dtype=torch.float32).expand(rows, -1),
        torch.full((rows,), temperature),
        None if top_p is None else torch.full((rows,), top_p),
        None if top_k is None else torch.full((rows,), top_k),
        torch.tensor(uniform, dtype=torch.float64),
    )
    return tokens.numpy(), logprobs.numpy()


def restricted(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """float64 probabilities [V] of one row, written anew: sort, cut to k, cut to the nucleus, renormalise."""
    weights = np.exp((logits.astype(np.float64) - logits[np.isfinite(logits)].max()) / temperature)
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if top_k:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    probabilities = np.zeros(len(weights))
    probabilities[kept] = weights[kept] / mass
    return probabilities


def inverse_transform(probabilities: np.ndarray, uniform: float) -> int:
    """The first token whose cumulative probability exceeds u."""
    return next(i for i, edge in enumerate(itertools.accumulate(probabilities)) if edge > uniform)


LOGITS = np.array([0.5, -np.inf, 2.0, 1.0, -1.0, -np.inf, 3.0, 0.0], dtype=np.float32)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 0.95, 0.05])
def test_tokens_and_logprobs_equal_an_independent_implementation(temperature: float, top_k: int, top_p: float) -> None:
    probabilities = restricted(LOGITS, temperature, top_p, top_k)
    uniform = np.random.default_rng(0).random(200)
    tokens, logprobs = choose(LOGITS, uniform, temperature, top_p, top_k)
    assert tokens.tolist() == [inverse_transform(probabilities, u) for u in uniform]
    assert np.allclose(logprobs, np.log(probabilities[tokens]), atol=1e-5)


def test_greedy_takes_the_largest_logit_whatever_the_uniform() -> None:
    tokens, logprobs = choose(LOGITS, np.array([0.0, 0.5, LARGEST]), temperature=0.0)
    assert tokens.tolist() == [6, 6, 6]
    expected = torch.log_softmax(torch.tensor(LOGITS), dim=-1)[6]
    assert np.allclose(logprobs, float(expected))


def test_greedy_ignores_top_p_and_top_k() -> None:
    plain = choose(LOGITS, np.array([0.3]), temperature=0.0)
    cut = choose(LOGITS, np.array([0.3]), temperature=0.0, top_p=0.1, top_k=1)
    assert np.array_equal(plain, cut)


def test_unrestricted_logprobs_are_the_log_softmax_at_the_temperature() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, 500).astype(np.float32)
    tokens, logprobs = choose(logits, rng.random(100), temperature=0.7)
    expected = torch.log_softmax(torch.tensor(logits) / 0.7, dim=-1).numpy()
    assert np.array_equal(logprobs, expected[tokens])


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LARGEST])
@pytest.mark.parametrize("size", [7, 512, 151_936])
@pytest.mark.parametrize("allowed", ["first", "last", "middle", "two", "scattered"])
def test_suppressed_tokens_are_never_chosen(uniform: float, size: int, allowed: str) -> None:
    ids = {
        "first": [0],
        "last": [size - 1],
        "middle": [size // 2],
        "two": [1, size - 2],
        "scattered": list(range(3, size - 1, max(size // 50, 3))),
    }[allowed]
    logits = np.full(size, -np.inf, dtype=np.float32)
    logits[ids] = np.random.default_rng(size).normal(0, 4, len(ids))
    for temperature in (0.0, 0.5, 1.0):
        tokens, logprobs = choose(logits, np.array([uniform]), temperature)
        assert tokens[0] in ids
        assert np.isfinite(logprobs[0])


def test_tokens_of_vanishing_probability_do_not_push_the_choice_onto_suppressed_ones() -> None:
    logits = np.array([-np.inf, 100.0, -1000.0, -np.inf, 0.0, -np.inf], dtype=np.float32)
    for uniform in (0.0, LARGEST):
        tokens, _ = choose(logits, np.array([uniform]))
        assert tokens[0] in (1, 4)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.one_of(st.floats(-80, 80, width=32), st.just(float("-inf"))), min_size=1, max_size=40),
    uniform=st.floats(0, LARGEST),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    top_k=st.integers(0, 5),
    top_p=st.floats(0.01, 1.0),
)
def test_whatever_is_drawn_has_a_probability(
    values: list[float], uniform: float, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.array([*values, 0.0], dtype=np.float32)
    tokens, logprobs = choose(logits, np.array([uniform]), temperature, top_p, top_k)
    assert np.isfinite(logits[tokens[0]])
    assert np.isfinite(logprobs[0])


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.7}])
def test_frequencies_follow_the_distribution(parameters: dict[str, float]) -> None:
    count = 40_000
    seeds = np.arange(count, dtype=np.uint64) + np.uint64(derive_seed(5))
    tokens, _ = choose(LOGITS, uniforms(seeds, np.zeros(count, dtype=np.uint64)), **parameters)
    probabilities = restricted(LOGITS, **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, **parameters})
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert counts[probabilities == 0].sum() == 0
    support = probabilities > 0
    assert stats.chisquare(counts[support], count * probabilities[support]).pvalue > 1e-4


def test_a_long_tail_of_small_probabilities_keeps_its_share() -> None:
    """Single precision cannot tell apart the running sums of 90 neighbours here."""
    size = 151_936
    logits = np.zeros(size, dtype=np.float32)
    logits[0] = np.log(9999 * (size - 1))  # one token in ten thousand is another one, and all others are equally likely
    shares = np.linspace(0.01, 0.99, 50)
    tokens, _ = choose(logits, 0.9999 + 0.0001 * shares)
    assert np.abs(tokens - shares * size).max() <= 20


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """A row without top-p and top-k gives the same bits beside rows that use them, its far tail included."""
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(0, 6, (4, 20_000)), dtype=torch.float32)
    uniform = torch.tensor([0.1, 0.5, 0.9, LARGEST], dtype=torch.float64)
    alone = choose_tokens(logits, torch.ones(4), None, None, uniform)
    top_p, top_k = torch.tensor([1.0, 0.5, 1.0, 1.0]), torch.tensor([0, 0, 7, 0])
    mixed = choose_tokens(logits, torch.ones(4), top_p, top_k, uniform)
    for row in (0, 3):
        assert int(alone[0][row]) == int(mixed[0][row])
        assert float(alone[1][row]) == float(mixed[1][row])


# --- randomness


def test_uniforms_depend_on_seed_and_step_alone() -> None:
    seeds, steps = np.array([1, 2, 3], dtype=np.uint64), np.array([0, 5, 9], dtype=np.uint64)
    together = uniforms(seeds, steps)
    assert together.tolist() == [float(uniforms(seeds[k : k + 1], steps[k : k + 1])[0]) for k in range(3)]
    assert len({*uniforms(np.full(100, 7, np.uint64), np.arange(100, dtype=np.uint64)).tolist()}) == 100


def test_splitmix64_gives_its_published_values() -> None:
    """The first outputs of the reference implementation (Vigna, splitmix64.c) for seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + k * golden) % 2**64 for k in range(5)], dtype=np.uint64)
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(states).tolist() == expected


@pytest.mark.parametrize("along", ["seeds", "steps", "both"])
def test_uniforms_are_uniform(along: str) -> None:
    count = 20_000
    ramp, zero = np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64)
    drawn = uniforms(zero if along == "steps" else ramp, zero if along == "seeds" else ramp)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 1e-4


def test_neighbouring_seeds_and_steps_are_uncorrelated() -> None:
    seeds, steps = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    grid = uniforms(seeds.reshape(-1), steps.reshape(-1)).reshape(200, 200)
    for one, other in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, 1:], grid[:-1, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(one.size)


def test_derived_seeds_are_63_bits_reproducible_and_sensitive_to_order() -> None:
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)
    assert derive_seed(1, 2, 3) != derive_seed(3, 2, 1)
    assert derive_seed(1, 2) != derive_seed(1, 2, 0)
    assert derive_seed(-1) == derive_seed(2**64 - 1)
    parts = itertools.product(range(2), range(10), range(10), range(10), range(3))
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == 6000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stats.kstest(np.array(sorted(seeds)) / 2.0**63, "uniform").pvalue > 1e-4
