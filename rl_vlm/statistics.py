"""Intervals, tests and estimates of samples."""

from __future__ import annotations

import math

import numpy as np

_RESAMPLES = 9999
_ROUNDING = 1e-12  # of sums of some hundred float64


def are_equal(values: np.ndarray) -> bool:
    """Whether numbers [N] are the same but for rounding, as 0.1 + 0.2 and 0.3 are."""
    return not len(values) or bool(np.ptp(values) <= _ROUNDING * max(1.0, float(np.abs(values).max())))


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a proportion (Wilson, 1927; SciPy's); (0, 1) without observations."""
    from scipy.stats import binomtest

    if total == 0:
        return 0.0, 1.0
    found = binomtest(int(successes), int(total)).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> float:
    """The unbiased estimate of pass@k from how many of the `samples` of each item were right, `correct` int [items]:
    the mean of 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, equation 1)."""
    total = math.comb(samples, k)
    return float(np.mean([1.0 - math.comb(samples - int(c), k) / total for c in correct]))


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean of [N] values (Efron, 1979; SciPy's); of paired samples give
    the differences. Unbounded with fewer than two values."""
    from scipy.stats import bootstrap

    if len(values) < 2:
        return -math.inf, math.inf
    rng = np.random.default_rng(seed)
    # A batch bounds the memory: each resample is as large as the values.
    found = bootstrap((values,), np.mean, method="percentile", n_resamples=_RESAMPLES, batch=256, rng=rng)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def mcnemar_p_value(first_only: int, second_only: int) -> float:
    """The exact two-sided p-value of McNemar's test (1947) on pairs that only one of two got right."""
    from scipy.stats import binomtest

    total = first_only + second_only
    return float(binomtest(first_only, total).pvalue) if total else 1.0


def mean_kl(log_ratio: np.ndarray) -> float:
    """KL(p || q) from log q - log p of samples from p, by the estimator k3, never negative (Schulman, 2020)."""
    values = log_ratio.astype(np.float64)
    return float(np.mean(np.expm1(values) - values))


def student_half_width(values: np.ndarray) -> np.ndarray:
    """Half the 95 % interval of the mean over the first axis [N, ...], N >= 2: t(0.975, N - 1) · s / √N."""
    from scipy.stats import t as student_t

    runs = len(values)
    return np.asarray(student_t.ppf(0.975, runs - 1) * values.std(0, ddof=1) / math.sqrt(runs))
