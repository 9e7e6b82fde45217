"""A page of `rl-vlm view` in Chromium, and what went wrong in it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright
from runs import ROOT, CommandProcess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = ROOT / "viewer" / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = ("curves", "episodes", "groups", "evaluation", "sight", "system")
_QUIET_LOOKS = 3
_FLAGS = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync")  # fmt: skip


def needs_browser() -> None:
    """Skip where no browser is installed, unless CI requires one."""
    missing = [
        what for what, there in (("Chromium", CHROMIUM), ("viewer/node_modules (make page)", AXE.exists())) if not there
    ]
    if missing and os.environ.get("RL_VLM_BROWSER") == "required":
        pytest.fail(f"There is no {' and no '.join(missing)}.")
    if missing:
        pytest.skip(f"There is no {' and no '.join(missing)}.")


@contextmanager
def chromium() -> Iterator[Browser]:
    needs_browser()
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*_FLAGS, *sandbox])
        yield browser
        browser.close()


@contextmanager
def served(*runs: Path, **environment: str) -> Iterator[str]:
    """The address of `rl-vlm view` of these runs."""
    with CommandProcess("view", *runs, "--port", "0", **environment) as command:
        command.wait_until(lambda: "Open http" in command.output(), "the address", 90)
        yield re.findall(r"Open (\S+)", command.output())[0].rstrip("/")


class Opened:
    """A page that notes errors, dialogs and requests to elsewhere."""

    def __init__(self, browser: Browser, address: str, width: int = 1440, scheme: Any = "light") -> None:
        context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        self.page: Page = context.new_page()
        self.address, self.problems = address, list[str]()
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self._asked = set[Request]()  # and not answered yet
        self.page.on("request", self._note_request)
        for ended in ("requestfinished", "requestfailed"):
            self.page.on(ended, lambda request: self._asked.discard(request))  # type: ignore[call-overload]

    def _note_request(self, request: Request) -> None:
        self._asked.add(request)
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"asks {request.url}")

    def go(self, place: str) -> Page:
        """Open a place such as `/#/curves/quickstart`, and wait until everything has come."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}{place}")
        quiet = 0  # looks in a row: the next request comes right after an answer
        while quiet < _QUIET_LOOKS:
            self.wait_until(lambda text: not self._asked and not re.search("Reading .* …", text))
            self.page.wait_for_timeout(20)
            quiet = 0 if self._asked else quiet + 1
        return self.page

    def wait_until(self, holds: Callable[[str], object], timeout: float = 20) -> float:
        """Wait until something holds of the page's text; returns after how many seconds. (Playwright's own wait for a
        function evaluates text, which the page's policy forbids.)"""
        started = time.monotonic()
        while not holds(self.page.locator("body").inner_text()):
            assert time.monotonic() - started < timeout, self.page.locator("body").inner_text()[:2000]
            self.page.wait_for_timeout(20)
        return time.monotonic() - started

    def violations(self) -> list[str]:
        """What axe finds that is serious or critical."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        return [
            f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")
        ]

    def overflows(self) -> bool:
        """Whether the page is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"))

    def close(self) -> None:
        self.page.context.close()


def number(text: str) -> float:
    """The first number in a text of the page."""
    found = re.search(r"[-−]?[\d,.]+(?:e[-−+]?\d+)?", text)
    assert found is not None, text
    return float(found[0].replace("−", "-").replace(",", ""))
