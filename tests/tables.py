"""Tables of cases that are data: tests/fixtures/answers."""

import json
from pathlib import Path
from typing import Any


def table(name: str) -> Any:
    """The table of this name."""
    return json.loads((Path(__file__).parent / "fixtures/answers" / f"{name}.json").read_text())
