"""The doors of `rl-vlm view`: who may look, what can be read, and what an answer allows a browser to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import HTTPSection, PolicyConfig, save_config
from rl_vlm.view.library import Library
from rl_vlm.view.server import CSP, PAGE, page_app

TOKEN = "a token/with=signs"
SECRET = "the secret of another folder"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "one"
    (run / "trajectories" / "images").mkdir(parents=True)
    save_config(PolicyConfig(), run / "config.yaml")
    (run / "progress.csv").write_text("iteration,reward/mean\n1,0.5\n")
    (tmp_path / "secret.txt").write_text(SECRET)
    (run / "error.log").write_text(SECRET)
    return tmp_path / "runs"


def ask(
    runs: Path, *paths: str, token: str | None = None, host: str = "localhost", **request: object
) -> list[httpx.Response]:
    async def all_of_them() -> list[httpx.Response]:
        app = page_app(Library([runs]), HTTPSection(), token)
        base = f"http://{host}:6007"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
            return [await client.request("GET", path, **request) for path in paths]  # type: ignore[arg-type]

    return asyncio.run(all_of_them())


EVERYTHING = ("/", "/app.js", "/api/v1/runs", "/api/v1/stamps", "/api/v1/runs/one", "/api/v1/runs/one/episodes")


def test_every_answer_forbids_foreign_programs(runs: Path) -> None:
    for answer in ask(runs, *EVERYTHING, "/none", "/api/v1/none"):
        assert answer.headers["content-security-policy"] == CSP
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    assert "unsafe" not in CSP and "default-src 'none'" in CSP


def test_without_a_token_only_this_machine_is_answered(runs: Path) -> None:
    assert [answer.status_code for answer in ask(runs, *EVERYTHING)] == [200] * 6
    assert {answer.status_code for answer in ask(runs, *EVERYTHING, host="evil.example")} == {403}


def test_beyond_loopback_the_token_is_needed_and_stays_out_of_the_address(runs: Path) -> None:
    def codes(*paths: str, **request: object) -> set[int]:
        return {answer.status_code for answer in ask(runs, *paths, token=TOKEN, host="10.0.0.1", **request)}

    assert codes(*EVERYTHING) == {401}
    assert codes(*EVERYTHING, headers={"Authorization": "Bearer wrong"}) == {401}
    assert codes("/?token=wrong", "/api/v1/runs?token=wrong") == {401}
    assert codes(*EVERYTHING, headers={"Authorization": f"Bearer {TOKEN}"}) == {200}
    (let_in,) = ask(runs, f"/?token={httpx.QueryParams({'t': TOKEN})['t']}", token=TOKEN, host="10.0.0.1")
    assert let_in.status_code == 303 and let_in.headers["location"] == "./"
    cookie = let_in.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    assert codes(*EVERYTHING, headers={"Cookie": cookie.split(";")[0]}) == {200}
    assert codes(*EVERYTHING, headers={"Cookie": "rl_vlm_token=wrong"}) == {401}


def test_beyond_loopback_it_does_not_start_without_a_token(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_VLM_API_TOKEN", raising=False)
    assert rl_vlm(["view", str(runs), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert rl_vlm(["view", str(runs / "nothing"), "--port", "0"]) == 2


WAYS_OUT = [
    f"/api/v1/runs/one/{kind}/{name}"
    for kind in ("images", "films", "episodes", "pairs")
    for name in (
        "../../../secret.txt", "..%2f..%2f..%2fsecret.txt", "%2e%2e/%2e%2e/secret.txt", "....//secret.txt", "error.log",
        "../error.log", "%00error.log", "error.log%00.png", "/etc/passwd", "..\\..\\secret.txt", "train-1-0/../../error.log",
        "file:%2f%2f%2fetc%2fpasswd", "%e2%80%ae.png", "step1_episode1_1.gif%2f..%2f..%2ferror.log",
    )
] + [
    "/../secret.txt", "/..%2fsecret.txt", "/page/../server.py", "/server.py", "/../server.py", "/LICENSES.md/../../server.py",
    "/api/v1/runs/..", "/api/v1/runs/../..", "/api/v1/runs/..%2f..%2fsecret.txt", "/api/v1/runs/%2e%2e/episodes",
    "/api/v1/runs/one/../../secret.txt", "/api/v1//etc/passwd", "/api/v1/runs/file:%2f%2f%2fetc",
]  # fmt: skip


def test_no_path_leads_out_of_the_files_that_are_shown(runs: Path) -> None:
    for path, answer in zip(WAYS_OUT, ask(runs, *WAYS_OUT), strict=True):
        assert answer.status_code == 404 or path.endswith("runs/.."), path
        assert SECRET not in answer.text and "root:" not in answer.text and "import" not in answer.text, path


def test_a_link_in_a_run_is_no_way_to_programs(runs: Path) -> None:
    """Files are sent as what their place says, whatever they hold."""
    name = "0" * 64
    (runs / "one" / "trajectories" / "images" / f"{name}.png").write_text("<script>alert(1)</script>")
    (answer,) = ask(runs, f"/api/v1/runs/one/images/{name}")
    assert answer.headers["content-type"] == "image/png"


def test_nothing_can_be_changed(runs: Path) -> None:
    async def every_method() -> set[int]:
        transport = httpx.ASGITransport(page_app(Library([runs]), HTTPSection(), None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return {
                (await client.request(method, path)).status_code
                for method in ("POST", "PUT", "DELETE", "PATCH")
                for path in EVERYTHING
            }

    assert asyncio.run(every_method()) <= {400, 404, 405}


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert "http" not in (PAGE / "index.html").read_text()
    assert "url(http" not in (PAGE / "app.css").read_text() and "@import" not in (PAGE / "app.css").read_text()
