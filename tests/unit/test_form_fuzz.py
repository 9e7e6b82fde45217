"""Schemas and tools of all kinds do no harm to a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from form_support import ask_all, requests
from http_support import EngineBackend, serving, tiny_engine


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("schemas", "tools"), [(60, 15), pytest.param(2000, 500, marks=pytest.mark.acceptance)])
def test_no_schema_and_no_tools_hurt_a_server(tiny_folder: Path, schemas: int, tools: int) -> None:
    with tiny_engine(tiny_folder) as engine, serving(EngineBackend(engine), tiny_folder) as server:
        statuses, seconds, mib = ask_all(server, requests(0, schemas, tools))
    assert statuses.total() == schemas + tools and statuses[200] > 0.15 * schemas, statuses
    assert seconds < 30 and mib < 512, (seconds, mib)  # of a busy machine; 2 s on an idle one
