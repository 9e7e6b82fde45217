"""What a grader's child does in tests: it starts at once and obeys its question."""

from __future__ import annotations

import os
import time
from typing import Any


def prepare() -> Any:
    return answer


def hanging() -> Any:
    return lambda request, _: time.sleep(60)


def slow() -> Any:
    time.sleep(60)


def answer(request: dict[str, str], _: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    order = request["answer"]
    if order == "hang":
        time.sleep(60)
    while order == "work":
        pass
    if order == "be late":
        time.sleep(2.4)
    if order == "die":
        os._exit(1)
    return {"reason": "correct", "cpu_s": 0.1}, []
