"""The child process of `grammar_check`: reads grammars with llguidance. It imports little, so that it starts fast."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal

from rl_vlm.child import Answer

CPU_S = 0.5  # to read a grammar; the engine that follows it takes as long again
MEMORY = 128 << 20  # bytes
_STACK = 4 << 20  # bytes, half of what threads of an engine have
_TOO_MUCH = f"to read it takes more than {CPU_S:g} s or {MEMORY >> 20} MiB: make it smaller"


def prepare(tokenizer: str, vocab_size: int, end_of_turn_id: int) -> Answer:
    """What answers with the reason why a grammar cannot be followed, "" if it can be. Each is read in a fork, so that
    the next one need not wait until the tokens are loaded again."""
    from llguidance import LLMatcher, LLTokenizer

    with open(tokenizer, encoding="utf-8") as file:
        tokens = LLTokenizer(file.read(), n_vocab=vocab_size, eos_token=end_of_turn_id)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def reason(lark: str) -> str:
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(lark), log_level=0)
        if error := matcher.get_error():
            return sentence(error)
        return "" if any(matcher.compute_bitmask()) and not matcher.get_error() else "nothing fits it"

    def answer(request: dict[str, str], _: list[bytes]) -> tuple[dict[str, str], list[bytes]]:
        reads, writes = os.pipe()
        if not (fork := os.fork()):
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its default action ends native code, too
            os.write(writes, reason(request["lark"]).encode())
            os._exit(0)
        os.close(writes)
        with open(reads, encoding="utf-8") as pipe:
            said = pipe.read()
        return {"error": _TOO_MUCH if os.waitpid(fork, 0)[1] else said}, []

    return answer


def sentence(error: object) -> str:
    """What llguidance says first, without where in our Lark that is, and its reason, which may come lines later."""
    first, _, rest = re.sub(r"^(at \d+\(\d+\): |panic: .*)", "", str(error)).partition("\n")
    why = re.search(r"^error: (.+)$", rest, re.MULTILINE)
    text = first.replace("regex parse error:", why[1] if why else "").strip(" .") or "it is too large"
    return text if len(text) <= 200 else f"{text[:80]} ... {text[-115:]}"
