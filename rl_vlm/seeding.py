"""Random numbers and seeds as hashes of integers, such as (run, iteration, group, sample, turn)."""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 finaliser, a bijective hash of uint64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def uniforms(seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1) for each (seed, step), both uint64 [R], whatever else is in the batch."""
    with np.errstate(over="ignore"):
        mixed = splitmix64(splitmix64(seeds) ^ (steps * _GOLDEN))
    return np.asarray((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def derive_seed(*parts: int) -> int:
    """A 63-bit seed."""
    # SplitMix64 on plain integers: for single numbers numpy's call overhead would dominate.
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
