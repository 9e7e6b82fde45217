"""MiniWoB-v0 in Chromium: tasks are solved by words, seeds repeat, pages that misbehave end their episode, nothing stays."""

from __future__ import annotations

import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import rl_vlm
from rl_vlm.envs.base import StepResult
from rl_vlm.zoo.miniwob.browser import PROGRAMS, Browser
from rl_vlm.zoo.miniwob.environment import MiniWoBEnv, all_tasks, folder


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[Browser]:
    """The browser of this process, kept open between tests."""
    missing = not any(map(shutil.which, PROGRAMS)) or importlib.util.find_spec("miniwob") is None
    if missing and os.environ.get("RL_VLM_BROWSER") != "required":
        pytest.skip("There is no Chromium, or no miniwob.")
    kept = Browser.shared()
    yield kept
    kept.give_back()


def made(task: str | list[str], **kwargs: Any) -> MiniWoBEnv:
    env = rl_vlm.make("MiniWoB-v0", tasks=task, **kwargs)
    assert isinstance(env, MiniWoBEnv)
    return env


def opened(task: str, index: int = 0, **kwargs: Any) -> MiniWoBEnv:
    env = made(task, **kwargs)
    env.reset(options={"index": index})
    return env


def at(env: MiniWoBEnv, selector: str) -> tuple[float, float]:
    """The centre of an element, in the page's pixels."""
    assert env.page is not None
    x, y = env.page.evaluate(
        f"(box => [box.x + box.width / 2, box.y + box.height / 2])(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    return x, y


def click(env: MiniWoBEnv, selector: str, scale: float = 2) -> str:
    x, y = at(env, selector)
    return f"click({scale * x}, {scale * y})"


def value(env: MiniWoBEnv, expression: str) -> Any:
    assert env.page is not None
    return env.page.evaluate(expression)


def wait_until(true: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


# --- words solve tasks


def drag_box(env: MiniWoBEnv) -> list[str]:
    (x1, y1), (x2, y2) = at(env, "#draggableSmall"), at(env, "#draggableLarge")
    return [f"drag({2 * x1}, {2 * y1}, {2 * x2}, {2 * y2})", click(env, "#subbtn")]


def enter_text(env: MiniWoBEnv) -> list[str]:
    return [
        click(env, "#tt"),
        f'type("{value(env, "document.querySelector(`#query .bold`).textContent")}")',
        click(env, "#subbtn"),
    ]


def copy_paste(env: MiniWoBEnv) -> list[str]:
    copied = [click(env, "#to-copy"), "key(ctrl+a)", "key(ctrl+c)"]
    return [*copied, click(env, "#answer-input"), "key(ctrl+v)", click(env, "#subbtn")]


def choose_list(env: MiniWoBEnv) -> list[str]:
    wanted = value(env, "core.getUtterance()").removeprefix("Select ").removesuffix(" from the list and click Submit.")
    return ["key(Tab)", f'type("{wanted}")', click(env, "button")]


def click_checkboxes(env: MiniWoBEnv) -> list[str]:
    wanted = value(env, "core.getUtterance()").removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
    boxes = value(env, "[...document.querySelectorAll('label')].map(label => label.textContent)")
    return [click(env, f"label:nth-of-type({n}) input") for n, name in enumerate(boxes, 1) if name in wanted] + [
        click(env, "#subbtn")
    ]


SOLVED: dict[str, Callable[[MiniWoBEnv], list[str]]] = {
    "click-test-2": lambda env: [click(env, "#subbtn")],
    "click-dialog": lambda env: [click(env, ".ui-dialog-titlebar-close")],
    "focus-text": lambda env: [click(env, "#tt")],
    "enter-text": enter_text, "copy-paste": copy_paste, "choose-list": choose_list, "drag-box": drag_box,
    "click-checkboxes": click_checkboxes,
}  # fmt: skip


def play(env: MiniWoBEnv, answers: list[str]) -> StepResult:
    """Give these answers, of which the last one ends the episode."""
    *first, last = answers
    assert not any(env.step(answer)[2] for answer in first)
    return env.step(last)


@pytest.mark.parametrize("task", SOLVED)
def test_words_solve_a_task(task: str) -> None:
    env = opened(task, 1)
    _, reward, terminated, truncated, info = play(env, SOLVED[task](env))
    assert (reward, terminated, truncated, info["correct"], info["outcome"]) == (1, True, False, True, "solved")
    env.close()


@pytest.mark.parametrize(
    ("coordinates", "scale"), [("unit", (1 / 160, 1 / 210)), ("thousandths", (1000 / 160, 1000 / 210))]
)
def test_coordinates_are_counted_as_the_policy_does(coordinates: str, scale: tuple[float, float]) -> None:
    env = opened("click-test-2", coordinates=coordinates)
    x, y = at(env, "#subbtn")
    assert env.step(f"click({x * scale[0]:.4f}, {y * scale[1]:.4f})")[1] == 1
    env.close()


def test_the_wrong_button_costs_as_much_as_the_right_one_gives() -> None:
    env = opened("click-test-2")
    _, reward, terminated, _, info = env.step(click(env, "#subbtn2"))
    assert (reward, terminated, info["correct"], info["outcome"]) == (-1, True, False, "failed")
    env.close()


def test_time_is_counted_in_turns() -> None:
    env = opened("click-test-2", max_turns=100)
    time.sleep(1)
    ended = [env.step("I think.")[1:3] for _ in range(10)]  # ten seconds, says the page
    assert ended == [(0, False)] * 9 + [(-1, True)]
    env.reset(options={"index": 0})
    assert env.step("done")[1:3] == (-1, True)
    slow = opened("click-test-2", turn_seconds=5)
    assert [slow.step("wait")[1:3] for _ in range(2)] == [(0, False), (-1, True)]
    short = opened("click-test-2", max_turns=1)
    result = short.step("wait")
    assert result[1:3] == (-1, True) and result[4]["outcome"] == "turns"
    for one in (env, slow, short):
        one.close()


# --- an item repeats to the byte


SCRIPT = ["click(60, 150)", 'type("ab")', "key(Tab)", "wait", "move(200, 300)"]


def pictures(task: str, index: int, split: str = "train", **kwargs: Any) -> list[str]:
    env = made(task, **kwargs)
    seen = [env.reset(options={"index": index, "split": split})[0].messages[0].images[0].sha256]
    for answer in SCRIPT:
        observation, _, terminated, *_ = env.step(answer)
        if terminated:
            break
        seen.append(observation.messages[0].images[0].sha256)
    env.close()
    return seen


MOVING = ["login-user", "chase-circle", "use-autocomplete", "click-pie", "enter-text", "click-shape"]


def test_an_item_opens_alike_to_the_byte_beside_others() -> None:
    alone = [pictures(task, 3)[0] for task in MOVING]
    with ThreadPoolExecutor(4) as threads:
        assert [seen[0] for seen in threads.map(pictures, MOVING, [3] * len(MOVING))] == alone
    first = pictures("click-test-2", 3)[0]
    others = [
        pictures("click-test-2", 4)[0],
        pictures("click-test-2", 3, "test")[0],
        pictures("click-test-2", 3, seed=1)[0],
    ]
    assert first not in others


# --- pages that misbehave


@pytest.fixture
def own_page(tmp_path: Path) -> Callable[[str], str]:
    def write(script: str) -> str:
        page, core = tmp_path / "mine.html", (folder().parent / "core" / "core").as_uri()
        page.write_text(
            f"<!DOCTYPE html><link rel=stylesheet href='{core}.css'><script src='{core}.js'></script><script>function genProblem() {{}}"
            f"onload = () => core.startEpisode()</script><div id=query>Do it.</div><button id=b onclick='{script}'>Go</button>"
        )
        return str(page)

    return write


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("while (true) {}", "hung"),
        ("while (true) alert(1)", "dialog"),
        ("window.open(`about:blank`)", "window"),
        ("location = `http://127.0.0.1/`", "navigated"),
        ("location = `file:///etc/passwd`", "navigated"),
        ("location.reload()", "navigated"),
        ("const all = []; while (true) all.push(new Array(1e6).fill({}))", "crashed"),
        ("(function again() { setTimeout(again, 0) })()", "turns"),
        ("print()", "turns"),
        ("location = `#part`", "turns"),
    ],
)
def test_a_page_that_misbehaves_ends_its_episode(own_page: Callable[[str], str], script: str, outcome: str) -> None:
    other = opened("click-test-2")
    env = opened(own_page(script), deadline_s=5 if outcome == "hung" else 30, max_turns=2)
    result = env.step(click(env, "#b"))
    assert result[4]["well_formed"]
    if not result[2]:  # what a page starts may come after its turn
        result = env.step("wait")
    assert (result[1], result[2], result[4]["outcome"]) == (-1, True, outcome)
    assert other.step(click(other, "#subbtn"))[1] == 1
    env.reset(options={"index": 0})
    env.close()
    other.close()


def test_a_page_reaches_no_network(own_page: Callable[[str], str]) -> None:
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        env = opened(
            own_page(
                f"for (const host of [`127.0.0.1`, `localhost`]) new Image().src = `http://${{host}}:{port}/`; fetch(`http://127.0.0.1:{port}/`)"
            )
        )
        assert env.step(click(env, "#b"))[4]["well_formed"]
        time.sleep(1)
        env.close()
        server.shutdown()
    assert not asked


# --- nothing stays


def test_a_dead_browser_is_an_error_and_the_next_episode_has_a_new_one() -> None:
    program = "import psutil, rl_vlm\nfrom rl_vlm.envs.errors import EnvCrashError\n" + (
        "env = rl_vlm.make('MiniWoB-v0', tasks='click-test-2')\nenv.reset(options={'index': 0})\n"
        "for one in psutil.Process().children(recursive=True):\n"
        "    try: one.kill()\n    except psutil.NoSuchProcess: pass  # it ended with its parent\n"
        "try: env.step('wait')\nexcept EnvCrashError: print('crash')\n"
        "env.reset(options={'index': 0}); print(env.step('wait')[1]); env.close()\n"
        "print(len(psutil.Process().children(recursive=True)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["crash", "0.0", "0"], done.stderr


@pytest.mark.parametrize("end", ["close", "kill"])
def test_no_process_and_no_file_outlives_its_runner(own_page: Callable[[str], str], end: str) -> None:
    hangs, tmp_path = (
        own_page("while (true) {}"),
        Path(tempfile.mkdtemp(prefix="mw")),
    )  # Chromium's socket: a short path
    program = (
        f"import rl_vlm, sys, threading\nenv = rl_vlm.make('MiniWoB-v0', tasks={hangs!r})\nenv.reset(options={{'index': 0}})\n"
        "threading.Thread(target=env.page.evaluate, args=['while (true) {}'], daemon=True).start()\n"
        f"print('open', flush=True); sys.stdin.read()\nif {end == 'close'}: env.close()\nprint('closed', flush=True); sys.stdin.read()"
    )
    temporary = {**os.environ, "TMPDIR": str(tmp_path)}
    runner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=temporary
    )
    assert runner.stdout is not None and runner.stdin is not None
    assert runner.stdout.readline() == b"open\n"
    running = psutil.Process(runner.pid).children(recursive=True)
    assert len(running) >= 4 and [*tmp_path.glob("rl_vlm_chromium_*")]
    if end == "kill":
        runner.kill()
    runner.stdin.close()
    runner.wait(60)
    wait_until(
        lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in running),
        "no process is left",
    )
    wait_until(lambda: not [*tmp_path.glob("rl_vlm_chromium_*")], "no file is left")
    shutil.rmtree(tmp_path)


def play_items(indices: list[int]) -> None:
    env = made(all_tasks())
    for index in indices:
        env.reset(options={"index": index})
        for answer in SCRIPT:
            if env.step(answer)[2]:
                break
    env.close()


def running() -> list[psutil.Process]:
    """All processes here but a service of its own models that Chromium starts after three minutes, also when idle."""
    here = psutil.Process()
    found = [one for one in [here, *here.children(recursive=True)] if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in found if not any("on_device_model" in word for word in one.cmdline())]


def footprint(browser: Browser) -> tuple[int, float]:
    """The number of pages, and the MB of all that runs here."""
    memory = sum(one.memory_full_info().pss for one in running()) / 2**20
    return len(browser.ask("Target.getTargets")["targetInfos"]), memory


@pytest.mark.acceptance
@pytest.mark.timeout(3000)
def test_a_thousand_episodes_leave_nothing_behind(browser: Browser) -> None:
    found, processes = [], 0
    for begin, end in ((0, 200), (200, 1200)):
        with ThreadPoolExecutor(8) as threads:
            [*threads.map(play_items, [[*range(begin + number, end, 8)] for number in range(8)])]
        time.sleep(10)  # for the last pages' processes to end, and the browser's own short-lived ones
        processes = most = processes or len(running())
        wait_until(lambda most=most: len(running()) <= most, "no process more than before", 60)  # type: ignore[misc]
        found.append(footprint(browser))
    print(found)
    (pages, memory), after = found
    assert after[0] == pages and after[1] <= 1.05 * memory


@pytest.mark.acceptance
def test_sixty_four_episodes_at_once_take_less_than_three_gibibytes(browser: Browser) -> None:
    tasks = all_tasks()
    with ThreadPoolExecutor(16) as threads:
        envs = [*threads.map(opened, [tasks[number % len(tasks)] for number in range(64)])]
        [*threads.map(lambda env: env.step("wait"), envs)]
    pages, memory = footprint(browser)
    print(pages, memory)
    for env in envs:
        env.close()
    assert pages >= 64 and memory < 3 * 1024
