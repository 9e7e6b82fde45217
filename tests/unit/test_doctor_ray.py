"""rl-vlm doctor on Ray's doors: the mode of the token's file, and ports that other machines reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl_vlm.cli.doctor import ray_checks
from rl_vlm.runs.surroundings import is_loopback

# A process with the name of Ray's node service that listens on an address.
LISTENER = """
import ctypes, socket, sys
ctypes.CDLL(None).prctl(15, b"raylet", 0, 0, 0)
sock = socket.create_server((sys.argv[1], 0))
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("mode", "status"), [(0o600, "ok"), (0o400, "ok"), (0o644, "warn"), (0o640, "warn")])
def test_a_token_that_others_may_read_is_told(
    mode: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "auth_token"
    token.write_text("very-secret")
    token.chmod(mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    check = next(ray_checks())
    assert (check.name, check.status) == ("ray token", status)
    assert "very-secret" not in check.detail
    assert check.remedy == ("" if status == "ok" else f"Run `chmod 600 {token}`.")


def test_without_a_token_there_is_nothing_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    assert next(ray_checks()).status == "ok"


@pytest.mark.parametrize(("host", "open_"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_ports_that_other_machines_reach_are_told(host: str, open_: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTENER, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        port = child.stdout.readline().strip()
        check = list(ray_checks())[1]
        assert check.name == "ray ports"
        assert (f"raylet {port}" in check.detail or f", {port}" in check.detail) == open_
        if open_:
            assert check.status == "warn" and "firewall" in check.remedy and "RAY_AUTH_MODE=token" in check.remedy
    finally:
        child.communicate("", timeout=120)


def test_loopback_in_all_its_spellings() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "::ffff:0.0.0.0", "192.0.2.2")))
