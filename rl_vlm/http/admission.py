"""When a request may enter the engine: once there is memory for its keys and values, and for its log-probabilities here."""

from __future__ import annotations

from rl_vlm.config import HTTPSection
from rl_vlm.http.budget import Budget, Lease
from rl_vlm.http.deadlines import Deadlines
from rl_vlm.http.errors import RequestError
from rl_vlm.http.kv_room import KVRoom
from rl_vlm.models.memory.parts import KV_BLOCK
from rl_vlm.types import GenerationRequest

_LARGEST_REPLIES = 2  # of log-probabilities, in memory at a time


class Leases:
    """The memory that a request holds."""

    def __init__(self) -> None:
        self.engine: Lease | None = None
        self.reply: Lease | None = None

    def leave_engine(self) -> None:
        """The engine has answered."""
        if self.engine is not None:
            self.engine.release()

    def release(self) -> None:
        """The answer is sent, or will never be."""
        self.leave_engine()
        if self.reply is not None:
            self.reply.release()


class Admission:
    """Lets requests in, in turns.

    Args:
        limits: the server's.
        deadlines: of the server.
        kv_room: the memory of the engines; None: they bound it themselves.
    """

    def __init__(self, limits: HTTPSection, deadlines: Deadlines, kv_room: KVRoom | None) -> None:
        self._limits, self._deadlines, self._kv_room = limits, deadlines, kv_room
        self._values = Budget(_LARGEST_REPLIES * limits.max_reply_values)

    async def enter(self, request: GenerationRequest, num_prompt_tokens: int, values: int, deadline: float) -> Leases:
        """Wait until the request may start; its reply has up to `values` log-probabilities. Raises RequestError."""
        room, samples = self._kv_room, request.sampling.n
        length = num_prompt_tokens + request.sampling.max_new_tokens
        if room is not None and length > room.longest(samples):
            raise RequestError(
                400,
                f"n ({samples}) x {length} tokens of context, each in whole blocks of {KV_BLOCK}, are more than the {room.largest} that this "
                "server has memory for in one request: ask for fewer samples or a smaller max_tokens.",
                param="n",
            )
        leases = Leases()
        try:
            async with self._deadlines.at(deadline):
                if values:
                    leases.reply = await self._values.take(values)
                if room is not None:
                    leases.engine = await room.take(samples, length)
        except BaseException as error:
            leases.release()
            if isinstance(error, TimeoutError):
                raise self._deadlines.too_late(self._limits.deadline_s) from error
            raise
        return leases
