"""Which cluster is joined and where a private one keeps its files, decided before Ray starts."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vlm.runs import surroundings
from rl_vlm.runs.surroundings import ClusterError, cluster_address, ray_folder
from rl_vlm.types import UserInputError


@pytest.fixture(autouse=True)
def short_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_JOB_ID", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of a socket that listens, as Ray's head does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_the_cluster_that_is_named_is_taken_if_it_answers(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    assert cluster_address() == listening


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "no-such-host.invalid:6379", "127.0.0.1", "127.0.0.1:99999", "auto"]
)
def test_a_cluster_that_does_not_answer_is_one_sentence_at_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(ClusterError, match="cannot be joined"):
        cluster_address()
    assert time.monotonic() - started < 15


def test_auto_is_what_ray_start_has_started_here(
    listening: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(f"{listening}\n")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cluster_address() == listening


def test_ray_stays_where_the_environment_puts_it() -> None:
    assert ray_folder() == (Path("/tmp/ray"), "")


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("kind", ["too long", "not there", "a file"])
def test_a_folder_that_will_not_do_is_replaced_and_told(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").write_text("a file")
    folder = {"too long": str(tmp_path / ("d" * 60)), "not there": "/proc/none", "a file": str(tmp_path)}[kind]
    monkeypatch.setenv(name, folder)
    chosen, told = ray_folder()
    assert chosen == Path("/tmp/ray") and folder in told


def test_no_place_at_all_is_an_error_that_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "can_write", lambda _: False)
    with pytest.raises(UserInputError, match="RAY_TMPDIR"):
        ray_folder()
