"""The key of a policy: its name, and the token that opens it on replicas that several runs share. No Ray."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from rl_vlm.types import POLICY, RLVLMError


class PolicyRefusedError(RLVLMError):
    """A request's token does not open its policy, or the policy is not served here."""


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """Who asks. `seat` numbers the policies that share replicas, so that each has a home among them.

    The default is that of a run with its own replicas, which need no token.
    """

    policy: str = POLICY
    token: str = field(default="", repr=False)
    seat: int = 0

    @classmethod
    def new(cls, policy: str) -> PolicyKey:
        """A key with a fresh token."""
        return cls(policy, secrets.token_urlsafe(32))

    @property
    def lock(self) -> str:
        """What is known of the token where it is checked."""
        return lock_of(self.token)


OWN = PolicyKey()  # of a run with its own replicas


def lock_of(token: str) -> str:
    """SHA-256 of a token, in hex. A token has 256 random bits, so its hash needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


def opens(token: str, lock: str) -> bool:
    """Whether a token belongs to a lock; takes the same time for every wrong one."""
    return bool(token) and hmac.compare_digest(lock_of(token), lock)
