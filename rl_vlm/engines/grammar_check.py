"""Asks a child process whether grammars can be followed. Some take all memory, or end the process that reads them."""

from __future__ import annotations

import tempfile
import threading
from functools import lru_cache

from rl_vlm.child import Child, ChildStartError
from rl_vlm.engines.grammar_child import MEMORY
from rl_vlm.frames import FrameError, PeerGoneError
from rl_vlm.types import RLVLMError, UserInputError

_TIMEOUT_S = 30.0  # of the clock, for half a second on a busy machine
_REMEMBERED = 1024  # verdicts


class GrammarCheckError(RLVLMError):
    """The process that checks grammars does not answer.

    Do: read the reason; the machine may have no memory left.
    """


class GrammarCheck:
    """Checks grammars for a model's tokens in a child process, one at a time; may be called from any thread."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_of_turn_id: int) -> None:
        self._file = tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json")  # noqa: SIM115
        self._file.write(tokenizer_json)
        self._file.flush()
        self._arguments = (self._file.name, vocab_size, end_of_turn_id)
        self._lock, self._verdict = threading.Lock(), lru_cache(_REMEMBERED)(self._ask)
        self._child = self._start()  # so that its imports do not wait for the first grammar

    def check(self, lark: str) -> None:
        """Raise UserInputError for a grammar in Lark that cannot be followed, GrammarCheckError if that is unknown."""
        with self._lock:
            if error := self._verdict(lark):
                raise UserInputError(f"The grammar cannot be followed: {error}.")

    def _ask(self, lark: str) -> str:
        for _ in range(2):  # again if the child was killed from outside
            if not self._child.alive:
                self._child = self._start()
            try:
                error: str = self._child.ask({"lark": lark}, timeout_s=_TIMEOUT_S)[0]["error"]
                return error
            except (ChildStartError, PeerGoneError, FrameError, TimeoutError) as error:
                reason = error
        raise GrammarCheckError(f"The process that checks grammars does not answer: {reason!r}.") from reason

    def _start(self) -> Child:
        return Child("rl_vlm.engines.grammar_child:prepare", self._arguments, memory=MEMORY)
