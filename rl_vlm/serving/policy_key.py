"""Which policy a client asks for, and where its calls go first. No Ray."""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.types import POLICY


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """A policy of a service. `home` is the place of its home replica where several policies share replicas."""

    policy: str = POLICY
    home: int = 0


OWN = PolicyKey()  # of a run with its own replicas
