"""The child process of `grammar_check`: reads grammars with llguidance. It imports little, so that it starts fast."""

from __future__ import annotations

import contextlib
import re
import resource

from rl_vlm.child import Answer

_STACK = 4 << 20  # bytes, half of what threads of an engine have


def prepare(tokenizer: str, vocab_size: int, end_of_turn_id: int) -> Answer:
    """In the child: what answers with the reason why a grammar cannot be followed, "" if it can be."""
    from llguidance import LLMatcher, LLTokenizer

    with open(tokenizer, encoding="utf-8") as file:
        tokens = LLTokenizer(file.read(), n_vocab=vocab_size, eos_token=end_of_turn_id)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    def answer(request: dict[str, str], _: list[bytes]) -> tuple[dict[str, str], list[bytes]]:
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(request["lark"]), log_level=0)
        if error := matcher.get_error():
            return {"error": sentence(error)}, []
        fits = any(matcher.compute_bitmask()) and not matcher.get_error()
        return {"error": "" if fits else "nothing fits it"}, []

    return answer


def sentence(error: object) -> str:
    """What llguidance says first, without where in our Lark that is, and its reason, which may come lines later."""
    first, _, rest = re.sub(r"^(at \d+\(\d+\): |panic: .*)", "", str(error)).partition("\n")
    why = re.search(r"^error: (.+)$", rest, re.MULTILINE)
    text = first.replace("regex parse error:", why[1] if why else "").strip(" .") or "it is too large"
    return text if len(text) <= 200 else f"{text[:80]} ... {text[-115:]}"
