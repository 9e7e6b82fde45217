"""Whose turn it is: round robin over names that pay for what they use. No clock, no threads."""

from __future__ import annotations

from collections.abc import Collection

# Tokens of a turn in an engine: some hundred short answers, so that a round of a small run is one turn.
QUANTUM = 8192


class Turns:
    """Deficit round robin (Shreedhar and Varghese 1996), paid afterwards, so that costs need not be known in advance.

    Each turn brings `quantum`; a name goes on while its account is positive and may overdraw it once, which its next turns pay
    back. So of two names that both have work all the time, neither gets more than `quantum` and one overdraft ahead of the other
    per round, whatever the sizes of their pieces. Who has no work loses what it has saved, and keeps what it owes.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._accounts: dict[str, int] = {}  # in the order of the turns, the current one first

    def next(self, busy: Collection[str]) -> str | None:
        """The name whose turn it is, of those that have work; None if nobody has."""
        if not busy:
            return None
        for name, account in self._accounts.items():
            if name not in busy:
                self._accounts[name] = min(account, 0)
        for name in busy:
            self._accounts.setdefault(name, 0)
        while True:
            name = next(iter(self._accounts))
            if name in busy and self._accounts[name] > 0:
                return name
            # To the end of the order. What it gets is for the turn that begins when it is the first again.
            account = self._accounts.pop(name)
            self._accounts[name] = account + self._quantum if name in busy else account

    def charge(self, name: str, cost: int) -> None:
        """`name` has used this much."""
        if name in self._accounts:
            self._accounts[name] -= cost

    def forget(self, name: str) -> None:
        """`name` will not come back."""
        self._accounts.pop(name, None)
