"""Actors that may die or hang: calls with a deadline, and restarts.

Env runners, the runners of control environments, and learners are called through this.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rl_vlm.types import RLVLMError

_LOOK_S = 0.5  # how often to look for results while some are missing
_AGAIN_S = 0.5  # before a call is sent again to an actor that Ray restarts
_FETCH_S = 30.0  # for a result that is complete
_PING_S = 1.0  # how long a probe waits for actors that do not answer yet
_STOP_S = 10.0

Ask = Callable[[int, Any], ray.ObjectRef]  # from the number and the handle of an actor to a call


class ActorLostError(RLVLMError):
    """An actor died, or did not answer in time.

    Do: read the actor's log of Ray.
    """


class ActorPool:
    """Actors by number. Ray restarts an actor that dies, if it was started so. A death is counted once, however many
    calls fail with it."""

    def __init__(self, handles: Mapping[int, Any]) -> None:
        self._handles = dict(handles)
        self._down: set[int] = set()  # their deaths are counted, and they have not come back
        self._deaths = 0  # not yet reported
        self.lives: Counter[int] = Counter()  # how often each actor died or was killed
        self._probed = 0.0

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, number: int) -> Any:
        return self._handles[number]

    @property
    def numbers(self) -> list[int]:
        return list(self._handles)

    @property
    def healthy(self) -> list[int]:
        """The actors that are up as far as is known."""
        return [number for number in self._handles if number not in self._down]

    @property
    def usable(self) -> list[int]:
        """The actors that work is divided among: all of them while none is up."""
        return self.healthy or self.numbers

    @property
    def restarts(self) -> int:
        """How often actors died or were killed."""
        return self.lives.total()

    def lose(self, number: int) -> None:
        """Count the death of an actor, once until it is back."""
        if number not in self._down:
            self._deaths += 1
            self.lives[number] += 1
            self._down.add(number)

    def found_up(self, number: int) -> None:
        """Note that an actor answered."""
        self._down.discard(number)

    def restart(self, number: int) -> None:
        """Kill an actor that hangs; Ray starts it again."""
        ray.kill(self._handles[number], no_restart=False)
        self.lives[number] += 1
        self._down.add(number)

    def probe(self, at_most_every_s: float = 0.0) -> None:
        """Look whether actors that are down are back."""
        if self._down and time.monotonic() - self._probed >= at_most_every_s:
            self._probed = time.monotonic()
            pings = {self._handles[number].ping.remote(): number for number in self._down}
            ready, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_S)
            for ping in ready:
                try:
                    ray.get(ping, timeout=_PING_S)
                except RayError:
                    continue  # it is still down
                self.found_up(pings[ping])

    def take_deaths(self) -> int:
        """How many actors died since the last call."""
        deaths, self._deaths = self._deaths, 0
        return deaths

    def begin(self, ask: Ask, numbers: Sequence[int] | None = None) -> Calls:
        """Call these actors (None: all) at the same time."""
        return Calls(self, ask, self.numbers if numbers is None else numbers)

    def stop(self) -> None:
        """Let each actor release what it holds, and end them all."""
        stopping = [self._handles[number].stop.remote() for number in self.healthy]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
        for handle in self._handles.values():
            ray.kill(handle)
        self._handles.clear()


class Calls:
    """One call to each of some actors."""

    def __init__(self, actors: ActorPool, ask: Ask, numbers: Sequence[int]) -> None:
        self._actors, self._ask, self._numbers = actors, ask, numbers
        self._running = {self._send(number): number for number in numbers}

    def _send(self, number: int) -> ray.ObjectRef:
        return self._ask(number, self._actors[number])

    def results(self, timeout_s: float, *, resend: bool = False) -> list[Any]:
        """What the calls return, in the order of the actors. With `resend`, an actor that died is called anew when Ray
        has restarted it.

        Raises what a call raised (RayTaskError) as soon as it is known, because the other actors may wait for that one;
        ActorLostError when an actor died, or when some are silent for `timeout_s`: these are killed.
        """
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while self._running:
            ready, _ = ray.wait(list(self._running), timeout=min(_LOOK_S, max(deadline - time.monotonic(), 0.0)))
            for call in ready:
                number = self._running.pop(call)
                try:
                    results[number] = ray.get(call, timeout=_FETCH_S)
                    self._actors.found_up(number)
                except RayTaskError:
                    raise
                except GetTimeoutError:
                    self._running[call] = number  # it has answered, and its result is on its way
                except RayError as error:
                    self._actors.lose(number)
                    if not resend:
                        first, *_, last = [*str(error).splitlines(), ""]
                        raise ActorLostError(f"An actor died: {first} {last}".rstrip()) from error
                    time.sleep(_AGAIN_S)
                    self._running[self._send(number)] = number
            if self._running and time.monotonic() > deadline:
                silent = set(self._running.values())
                for number in silent:
                    self._actors.restart(number)
                raise ActorLostError(f"{len(silent)} of {len(self._numbers)} did not answer within {timeout_s:g} s")
        return [results[number] for number in self._numbers]
