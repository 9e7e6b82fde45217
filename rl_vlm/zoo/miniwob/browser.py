"""Chromium over its DevTools pipe: one browser for all pages of a process, whose clocks stand still between turns."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

from rl_vlm.envs.errors import EnvCrashError, EnvError
from rl_vlm.safe_text import child_environment
from rl_vlm.types import UserInputError

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-sync", "--disable-component-update", "--disable-background-networking", "--disable-quic",
    "--disable-breakpad", "--mute-audio", "--hide-scrollbars", "--lang=en-US", "--force-color-profile=srgb",
    # Nothing but files: every other address goes to a proxy that is not there, this machine's own included.
    "--proxy-server=socks5://0.0.0.0:1", "--proxy-bypass-list=<-loopback>", "--host-resolver-rules=MAP * ~NOTFOUND",
    # What a page draws depends on its own clock alone. Without the first of these, a busy machine may see no frame.
    "--run-all-compositor-stages-before-draw", "--disable-new-content-rendering-timeout", "--disable-checker-imaging",
    "--disable-threaded-animation", "--disable-threaded-scrolling", "--disable-smooth-scrolling",
    # A page has a process of its own, whose clock it shares with no other. Two more would draw its address bar.
    "--renderer-process-limit=4096", "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup",
    "--js-flags=--random-seed=1 --max-old-space-size=256",
)  # fmt: skip
# The pipe is the shell's stdin and stdout. Chromium ends when it closes, also when this process is killed.
_RUN = '"$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1; rm -rf "$0"'
_ASK_S, _NUDGE_S, _CLOSE_S = 30.0, 2.0, 5.0
_EPOCH = 1_480_000_000  # seconds since 1970 at which the clock of every page starts


class PageLostError(Exception):
    """A page cannot be played on; the message says why: hung, crashed, dialog, window or navigated."""


class Browser:
    """A Chromium that this process alone talks to, from any thread, and that ends with it.

    Raises UserInputError where none is installed, EnvCrashError when it died.
    """

    _shared: ClassVar[Browser | None] = None
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise UserInputError("MiniWoB-v0 needs Chromium: run `apt-get install chromium`.")
        folder = tempfile.mkdtemp(prefix="rl_vlm_chromium_")
        flags = [*_FLAGS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self._process = process = subprocess.Popen(
            ["sh", "-c", _RUN, folder, program, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a group, which can be killed whole and gets no Ctrl-C
            env=child_environment(TZ="UTC", LANG="C.UTF-8"),
        )
        assert process.stdin is not None and process.stdout is not None
        self._writes, self._reads = process.stdin, process.stdout.fileno()
        self.close = weakref.finalize(self, _end, process, folder)
        self.alive, self._users = True, 0
        self.pages: dict[str, Page] = {}  # by session
        self._waiting: dict[int, tuple[str, Future[Any]]] = {}  # by number of the command, with its session
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        threading.Thread(target=self._read, daemon=True, name="chromium").start()
        try:
            self.ask("Target.setDiscoverTargets", discover=True)
        except EnvError as error:
            self.close()
            raise EnvCrashError(
                f"Chromium did not start: run `{program} --headless about:blank` to see why."
            ) from error

    @classmethod
    def shared(cls) -> Browser:
        """The browser of this process, started where there is none; `give_back` it."""
        with cls._sharing:
            if cls._shared is None or not cls._shared.alive:
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def give_back(self) -> None:
        """Close it unless others use it."""
        with Browser._sharing:
            self._users -= 1
            if not self._users:
                self.alive = False
                self.close()

    def send(self, method: str, session: str = "", **params: Any) -> Future[Any]:
        """Send a command of the Chrome DevTools Protocol; the future gets its result."""
        command = {"method": method, "params": params} | ({"sessionId": session} if session else {})
        future: Future[Any] = Future()
        with self._lock:
            if not self.alive:
                raise EnvCrashError("Chromium died.")
            number = next(self._numbers)
            self._waiting[number] = session, future
            with suppress(OSError):  # it died: the reader says so to the future
                self._writes.write(json.dumps({"id": number, **command}).encode() + b"\0")
                self._writes.flush()
        return future

    def ask(self, method: str, **params: Any) -> Any:
        """The result of a command that concerns no page."""
        try:
            return self.send(method, **params).result(_ASK_S)
        except TimeoutError as error:
            raise EnvError(f"Chromium did not answer {method} within {_ASK_S:g} s.") from error

    def fail(self, session: str, error: Exception) -> None:
        """Fail the commands whose results a session waits for."""
        with self._lock:
            for number in [number for number, (of, _) in self._waiting.items() if of == session]:
                self._waiting.pop(number)[1].set_exception(error)

    def _read(self) -> None:
        left = b""
        while chunk := os.read(self._reads, 1 << 16):
            *messages, left = (left + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._on_result(message)
                else:
                    self._on_event(message["method"], message["params"], message.get("sessionId", ""))
        with self._lock:
            self.alive = False
        self.fail("", EnvCrashError("Chromium died."))
        for page in [*self.pages.values()]:
            page.fail(EnvCrashError("Chromium died."))

    def _on_result(self, message: dict[str, Any]) -> None:
        with self._lock:
            _, future = self._waiting.pop(message["id"], ("", Future()))  # no one waits where the page is lost
        if "error" in message:
            future.set_exception(EnvError(f"Chromium: {message['error'].get('message')}"))
        else:
            future.set_result(message["result"])

    def _on_event(self, method: str, params: dict[str, Any], session: str) -> None:
        pages = {**self.pages}
        page = pages.get(params.get("sessionId", session))
        if method == "Target.targetCreated" and (opener := params["targetInfo"].get("openerId")):
            page = next((one for one in pages.values() if one.target == opener), None)
        if page is not None:
            page.on_event(method, params)


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it died
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLOSE_S)
    with suppress(ProcessLookupError):  # all of it ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class Page:
    """A page in a window and process of its own, whose clock runs in `advance` alone.

    All methods raise PageLostError where the page is lost; one that does not answer in `deadline_s` hangs.
    """

    def __init__(self, browser: Browser, deadline_s: float) -> None:
        self._browser, self._deadline_s = browser, deadline_s
        self._session = self.target = self._lost = ""
        self._loaded = False
        self._advanced: Future[None] = Future()
        self.clipboard = ""  # Chromium's own is shared by all pages
        self._context = browser.ask("Target.createBrowserContext", disposeOnDetach=True)["browserContextId"]

    def load(self, address: str, width: int, height: int) -> None:
        """Open a file in a window of this size; the page must not leave it."""
        of, ask = {"browserContextId": self._context}, self._browser.ask
        ask("Browser.setDownloadBehavior", behavior="deny", **of)
        self.target = ask("Target.createTarget", url="about:blank", width=width, height=height, **of)["targetId"]
        self._session = ask("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        self._browser.pages[self._session] = self
        for domain in ("Page", "Inspector"):  # whose events are needed
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as if its window were the active one
        self.call("Emulation.setVirtualTimePolicy", policy="pause", initialVirtualTime=_EPOCH)
        self.call("Page.navigate", url=address)
        self.advance(0.5, "pauseIfNetworkFetchesPending")
        self._loaded = True

    def advance(self, seconds: float, policy: str = "advance") -> None:
        """Let the clock of the page run for so long, which takes only as long as what happens in it."""
        self._advanced = Future()
        self.call("Emulation.setVirtualTimePolicy", policy=policy, budget=seconds * 1000)
        self._wait(self._advanced)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises EnvError where it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise EnvError(f"The page raised {found['exceptionDetails'].get('exception', {}).get('description')}")
        return found["result"].get("value")

    def screenshot(self, width: int, height: int, scale: int) -> bytes:
        """The upper left part of the page as PNG, `scale` times as large."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", clip=clip)["data"])

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the Chrome DevTools Protocol."""
        if self._lost:
            raise PageLostError(self._lost)
        return self._wait(self._browser.send(method, self._session, **params))

    def _wait(self, future: Future[Any]) -> Any:
        for seconds in (_NUDGE_S, self._deadline_s):
            try:
                return future.result(seconds)
            except TimeoutError:  # on a busy machine a page may see no frame until its window is raised
                self._browser.send("Page.bringToFront", self._session)
        self._lost = self._lost or "hung"
        raise PageLostError(self._lost)

    def close(self) -> None:
        """Close it, whatever it does, with all windows that it opened."""
        self._browser.pages.pop(self._session, None)
        with suppress(EnvError):  # it is gone with its browser
            self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        """Called by the thread that reads, so it never waits."""
        reason = {
            "Page.javascriptDialogOpening": "dialog", "Target.targetCreated": "window",
            "Inspector.targetCrashed": "crashed", "Target.detachedFromTarget": "crashed",
        }.get(method)  # fmt: skip
        if method == "Page.frameNavigated" and self._loaded and "parentId" not in params["frame"]:
            reason = "navigated"
        if reason:
            self._lost = self._lost or reason
            self.fail(PageLostError(self._lost))
        elif method == "Emulation.virtualTimeBudgetExpired" and not self._advanced.done():
            self._advanced.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise an error where something of the page is waited for."""
        self._browser.fail(self._session, error)
        if not self._advanced.done():
            self._advanced.set_exception(error)
