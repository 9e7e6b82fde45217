"""The body of a request while it is in memory."""

from __future__ import annotations

from rl_vlm.http.budget import Budget, Lease


class Body:
    """The body of a request, for one reader. It counts against the server's memory until `release`."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._lease: Lease | None = None
        self.size = 0

    def add(self, piece: bytes) -> None:
        """What has arrived."""
        self._pieces.append(piece)
        self.size += len(piece)

    async def reserve(self, budget: Budget, amount: int) -> None:
        """Wait for the memory that the body takes."""
        if self._lease is None:
            self._lease = await budget.take(amount)

    def take(self) -> bytes:
        """All of it; a second call gives nothing, so that nobody keeps it by accident."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def release(self) -> None:
        """Nothing of it is in memory any more."""
        self._pieces = []
        if self._lease is not None:
            self._lease.release()
