"""SIGINT and SIGTERM: the first lets a run save its checkpoint, and the run's process says so by its name."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from rl_vlm.types import RLVLMError

# Names of a run's process (15 characters at most): arguments do not show that a script is a run, and a second SIGTERM
# would end one that saves its checkpoint already.
RUNNING, STOPPING = "rl-vlm:run", "rl-vlm:stopping"


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Inside, a signal is reported on stderr and raises SystemExit with its exit code, 130 or 143."""
    caught: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        caught.append(number)
        print(f"Interrupted by {signal.Signals(number).name}: ending what was started.", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    with _handled(handle):
        try:
            yield
        except BaseException:
            if caught:  # Ray turns any exit code from a call of its own into 1, and what is half started fails
                raise SystemExit(128 + caught[0]) from None
            raise


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, both signals call `handle`."""
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def name_this_process(name: str) -> None:
    """Name this process, where the system has such names."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


class InterruptedRun(RLVLMError):
    """SIGINT or SIGTERM ended the run; `what_now` says what a resume finds.

    Do: go on with `--resume`.
    """

    def __init__(self, number: int, what_now: str) -> None:
        super().__init__(f"Interrupted by {signal.Signals(number).name}; {what_now}.")
        self.exit_code = 128 + number


class StopRequest:
    """Remembers the first SIGINT or SIGTERM and calls `notify`; a second one, or any while starting, raises
    KeyboardInterrupt."""

    def __init__(
        self,
        notify: Callable[[], None] = lambda: None,
        sentence: str = "Stopping: saving a checkpoint first. Once more to stop at once.",
    ) -> None:
        self.signal: int | None = None
        self._notify, self._sentence = notify, sentence
        self.starting = True

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def installed(self, announce: Callable[[str], None]) -> Iterator[None]:
        def handle(number: int, _: FrameType | None) -> None:
            name_this_process(STOPPING)
            second, self.signal = self.signal is not None, number
            if second or self.starting:
                raise KeyboardInterrupt
            announce(self._sentence)
            self._notify()

        named = psutil.Process().name()
        name_this_process(RUNNING)
        try:
            with _handled(handle):
                yield
        finally:
            name_this_process(named)
