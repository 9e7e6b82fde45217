"""The page of `rl-vlm view` in a real browser: every view of a real run, by keyboard too; hostile runs; live runs."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import VIEWS, Opened, chromium, number, served
from hostile import BIDI, PAYLOADS, TEXTS, write_hostile_run
from PIL import Image
from playwright.sync_api import Browser
from runs import ROOT, environment, rl_vlm
from tool_run import DIED, REPLICAS, write_tool_run

# A report is the same page in one file.
PLACES = ["address", pytest.param("report", marks=pytest.mark.acceptance)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def places(quickstart_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's run, one of a tool environment and a hostile one."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(quickstart_run, folder / "quickstart", ignore=shutil.ignore_patterns("checkpoints"))
    write_tool_run(folder / "tools")
    write_hostile_run(folder / "hostile")
    return folder


@pytest.fixture(scope="module")
def address(places: Path) -> Iterator[str]:
    with served(places) as found:
        yield found


@pytest.fixture
def opened(browser: Browser, address: str) -> Iterator[Opened]:
    page = Opened(browser, address)
    yield page
    page.close()


def answer(address: str, path: str) -> Any:
    return httpx.get(f"{address}/api/v1/{path}", timeout=30).raise_for_status().json()


@pytest.mark.parametrize(
    "width, scheme",
    [
        (390, "dark"),
        *(
            pytest.param(*one, marks=pytest.mark.acceptance)
            for one in ((1440, "dark"), (1440, "light"), (390, "light"))
        ),
    ],
)
def test_every_view_is_whole_at_every_width_and_scheme(browser: Browser, address: str, width: int, scheme: str) -> None:
    page = Opened(browser, address, width, scheme)
    newest = answer(address, "runs/quickstart/episodes")["id"][0]
    for place in ("/", *(f"/#/{view}/quickstart" for view in VIEWS), f"/#/episodes/quickstart?open={newest}"):
        page.go(place)
        assert page.page.locator("main h1").count() == 1, place
        assert page.violations() == [], place
        assert not page.overflows(), place
    assert page.problems == []
    page.close()


@pytest.fixture(scope="module")
def report(places: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of the run with tools and the hostile one."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    done = rl_vlm("report", places / "tools", places / "hostile", "--out", out)
    assert done.returncode == 0, done.stderr
    return out.as_uri()


@pytest.mark.parametrize("where", PLACES)
def test_on_a_phone_tables_scroll_and_the_page_does_not(
    browser: Browser, address: str, where: str, request: pytest.FixtureRequest
) -> None:
    page, wide = Opened(browser, request.getfixturevalue(where), 390), set()
    places = [""]
    for run in ("tools", "hostile"):  # the second has names and reasons of one long word
        listed = answer(address, f"runs/{run}/episodes")
        group = httpx.QueryParams({"group": listed["group"][0]})
        places += [f"#/{view}/{run}" for view in VIEWS] + [f"#/groups/{run}?{group}"]
        places += [f"#/episodes/{run}?mode=table", f"#/episodes/{run}?open={listed['id'][-1]}"]
    for place in places:
        opened = page.go(f"{'/' if where == 'address' else ''}{place}")
        opened.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        opened.wait_for_timeout(100)
        assert not page.overflows(), place
        tables = opened.evaluate(
            """() => [...document.querySelectorAll('table')].map((table) => {
                 let box = table.parentElement;
                 while (box && !/auto|scroll/.test(getComputedStyle(box).overflowX)) box = box.parentElement;
                 return [!!box && box.getBoundingClientRect().right <= innerWidth, !!box && table.offsetWidth > box.clientWidth];
               })"""
        )
        assert all(inside for inside, _ in tables), place
        wide |= {place for _, wider in tables if wider}
    assert {"", "#/system/tools", "#/groups/tools", "#/episodes/tools?mode=table"} <= wide  # that is, they scrolled
    page.close()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "place", ["#/episodes/tools", "#/sight/tools", "#/evaluation/tools", "#/groups/tools?group=12%2F1"]
)
def test_cards_show_the_picture_behind_the_last_answer_and_how_many_there_are(
    browser: Browser, address: str, where: str, place: str, request: pytest.FixtureRequest
) -> None:
    page = Opened(browser, request.getfixturevalue(where))
    page.go(f"{'/' if where == 'address' else ''}{place}")
    cards = page.page.evaluate(
        """async () => Promise.all([...document.querySelectorAll('main img')].flatMap((image) => {
             const card = image.closest('.card, .sides > div, article');
             if (!card) return [];
             const name = new URLSearchParams((card.closest('a') ?? card.querySelector('a')).hash.split('?')[1]).get('open');
             image.loading = 'eager';
             return [image.decode().then(() => [name, image.src, card.innerText])];
           }))"""
    )
    shown = {}
    for name, source, text in cards:
        messages = answer(address, f"runs/tools/episodes/{name}")["messages"]
        last = max(k for k, message in enumerate(messages) if message["role"] == "assistant")
        seen = [part["picture"]["sha"] for one in messages[:last] for part in one["parts"] if "picture" in part]
        assert f"{len(seen)} pictures" in text, name
        if where == "address":
            assert source.endswith(f"/{seen[-1]}"), name
        assert shown.setdefault(seen[-1], source) == source
    assert len(shown) == len(set(shown.values())) > 3  # they do not look alike
    page.close()


def test_findings_name_the_replica_and_the_cause(opened: Opened) -> None:
    for place in ("/", "/#/curves/tools"):
        said = opened.go(place).locator("main").inner_text()
        assert said.count(DIED) >= 2 and f"Replica {REPLICAS[1]} seems to serve other weights" in said, place
        assert f"The cause is replica {REPLICAS[1]}" in said, place


def test_the_keyboard_reaches_everything(opened: Opened, address: str) -> None:
    newest = answer(address, "runs/quickstart/episodes")["id"][0]
    for place in ("/", "/#/curves/quickstart", f"/#/episodes/quickstart?open={newest}", "/#/evaluation/quickstart"):
        page = opened.go(place)
        wanted = page.evaluate(
            """() => [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
                 .filter((one) => !one.disabled && one.checkVisibility() && one.tabIndex >= 0).map((one, k) => (one.dataset.stop = k))"""
        )
        assert len(wanted) > 5, place
        page.evaluate("document.activeElement.blur()")
        reached = set()
        for _ in range(len(wanted) + 20):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.dataset.stop ?? ''"))
        # A list that shows only what is near renews its cards while it scrolls.
        assert len(set(map(str, wanted)) - reached) <= 0.1 * len(wanted), place


@pytest.mark.real
def test_numbers_on_the_page_are_those_of_the_files(opened: Opened, address: str) -> None:
    listed = answer(address, "runs/quickstart/episodes")
    rng = random.Random(0)
    trained = [k for k, kind in enumerate(listed["kind"]) if kind == "train" and listed["advantage"][k]]
    for k in rng.sample(trained, 5):
        name = listed["id"][k]
        told = answer(address, f"runs/quickstart/episodes/{name}")
        page = opened.go(f"/#/episodes/quickstart?open={name}&colour=ratio")
        facts = page.locator("main").inner_text()
        assert f"Episode {name}" in facts
        tokens = page.locator("[data-token]")
        for place in rng.sample(range(tokens.count()), 4):
            token = tokens.nth(place)
            position = int(token.get_attribute("data-token") or -1)
            token.hover()
            spans = "[...document.querySelectorAll('.panel span')]"
            shown = dict(
                page.evaluate(
                    f"{spans}.map((one) => [one.firstChild.textContent.trim(), one.querySelector('b').textContent])"
                )
            )
            engine, learner = told["engine"][position], told["learner"][position]
            for label, value in {
                "log-probability, engine": engine, "log-probability, learner": learner, "gap, learner − engine": learner - engine,
                "ratio, learner / engine": math.exp(learner - engine), "advantage": told["advantages"][position],
            }.items():  # fmt: skip
                assert number(shown[label]) == pytest.approx(value, rel=1e-4, abs=1e-9), (name, position, label)


def test_filters_and_links_reopen_a_view(opened: Opened, address: str) -> None:
    listed = answer(address, "runs/quickstart/episodes")
    wrong = sum(kind == "train" and not right for kind, right in zip(listed["kind"], listed["correct"], strict=True))
    page = opened.go("/#/episodes/quickstart?kind=train&correct=no")
    assert re.search(rf"\b{wrong:,} of {len(listed['id']):,} episodes", page.locator("main").inner_text())
    page.locator("li a, .card").first.click()
    page.wait_for_url("**open=**")
    link = page.evaluate("location.hash")
    again = opened.go(f"/{link}")
    assert "✗ wrong" in again.locator("main").inner_text()
    assert opened.problems == []


def test_a_chart_shows_the_part_that_is_dragged_over(opened: Opened) -> None:
    page = opened.go("/#/curves/quickstart")
    charts = page.locator("figure").all()[:3]

    def rows() -> list[list[int]]:
        return [[int(text) for text in chart.locator("tbody th").all_inner_texts()] for chart in charts]

    for chart in charts:
        chart.locator("summary").click()
    all_rows, plot = rows(), charts[0].locator(".u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    for share, act in ((0.25, page.mouse.down), (0.5, page.mouse.up)):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2, steps=5)
        act()
    middle = (all_rows[0][0] + all_rows[0][-1]) / 2
    quarter = (all_rows[0][0] + middle) / 2
    within = [[one for one in chart if quarter <= one <= middle] for chart in all_rows]
    assert rows() == within != all_rows
    plot.dblclick()
    assert rows() == all_rows
    assert opened.problems == []


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.acceptance)])
def test_nothing_in_a_run_can_run_in_the_page(opened: Opened, address: str, every: int) -> None:
    """Each of the payloads in questions, answers, thoughts, tool calls, replies, info, names, messages, metrics, failures.

    every: of how many episodes one is opened.
    """
    assert len(PAYLOADS) >= 50
    listed = answer(address, "runs/hostile/episodes")
    assert len(listed["id"]) == 3 * len(TEXTS)
    marks = "".join([*BIDI, "\x1b", "\x00", "\x9b"])
    opened.page.add_init_script("Object.defineProperty(window, 'pwned', {set() { alert('pwned') }})")
    groups = [
        f"/#/groups/hostile?{httpx.QueryParams({'group': name})}"
        for name in dict.fromkeys(listed["group"][: 2 * len(TEXTS) : 8 * every])
    ]
    episodes = [f"/#/episodes/hostile?open={name}&colour=engine" for name in listed["id"][: 2 * len(TEXTS) : 2 * every]]
    for place in ("/", *(f"/#/{view}/hostile" for view in VIEWS), *episodes, *groups):
        page = opened.go(place)
        assert not set(page.locator("body").inner_text()) & set(marks), place
        strange = (
            "script:not([src]), iframe, object, embed, base, form, marquee, meta[http-equiv], img:not([src^='api/'])"
        )
        assert page.locator(strange).count() == 0, place
        links = page.evaluate(
            "[...document.querySelectorAll('[href], [src]')].map((one) => one.href?.baseVal ?? one.href ?? one.src)"
        )
        assert all(link.startswith((address, "data:,", "#")) for link in links), (place, links)
    assert [one for one in opened.problems if "404" not in one] == []


def test_a_hostile_report_is_as_harmless(browser: Browser, places: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert rl_vlm("report", places / "hostile", "--out", out).returncode == 0
    page = Opened(browser, out.as_uri())
    page.page.add_init_script("Object.defineProperty(window, 'pwned', {set() { alert('pwned') }})")
    for view in VIEWS:
        page.go(f"#/{view}/hostile")
    assert page.problems == []
    page.close()


@pytest.mark.real
def test_a_report_opens_without_a_server(browser: Browser, places: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = rl_vlm("report", places / "quickstart", "--out", out, "--episodes", 200)
    assert done.returncode == 0, done.stderr
    page = Opened(browser, out.as_uri())
    for view in VIEWS:
        page.go(f"#/{view}/quickstart")
        assert page.page.locator("main p.bad").count() == 0, view
    page.go("#/episodes/quickstart")
    assert "200 of 200 episodes" in page.page.locator("main").inner_text()
    assert page.page.locator("main img").first.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 0
    assert page.problems == []
    page.close()


def test_a_run_that_goes_on_is_followed(browser: Browser, places: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing"
    shutil.copytree(places / "quickstart", growing)
    (growing / "result.json").unlink()
    held = sorted((growing / "trajectories").glob("*.parquet"))[-1]
    later = held.read_bytes()
    held.unlink()
    with served(growing) as address:
        page = Opened(browser, address)
        page.go("/#/episodes/growing")
        text = page.page.locator("main").inner_text
        before = int(re.search(r"of ([\d,]+) episodes", text())[1].replace(",", ""))
        held.write_bytes(later)
        print("followed after", page.wait_until(lambda text: f"of {before:,} episodes" not in text), "s")
        page.go("/#/curves/growing")
        assert "running" in page.page.locator("body").inner_text()
        (growing / "result.json").write_text(json.dumps({"status": "failed", "error": "It broke."}))
        page.wait_until(lambda text: "It broke." in text)
        assert page.problems == []
        page.close()


def test_beyond_loopback_the_address_lets_the_browser_in(browser: Browser, places: Path) -> None:
    with served(places, "--host", "0.0.0.0", RL_VLM_API_TOKEN="the secret") as address:  # type: ignore[arg-type]
        bare = address.split("?")[0].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{bare}/api/v1/runs").status_code == 401
        page = Opened(browser, bare.rstrip("/"))
        page.go("/?token=the%20secret")
        assert "quickstart" in page.page.locator("main").inner_text() and "secret" not in page.page.url
        page.close()


@pytest.mark.real
def test_a_program_reads_what_the_page_shows(address: str) -> None:
    """The sequence of docs/view.md: which run, which episodes, one of them."""
    run = next(line for line in answer(address, "runs")["runs"] if line["name"] == "quickstart")
    assert run["status"] == "done" and run["accuracy"][1] >= 0.9
    found = answer(address, f"runs/{run['id']}/search?text=How many")["ids"]
    assert found and answer(address, f"runs/{run['id']}/episodes/{found[0]}")["tokens"]
    shown = json.loads(rl_vlm("show", ROOT / "none", "--json").stdout or "{}")
    assert shown == {}


TUTORIAL = ROOT / "docs" / "tutorial_reading.md"
STEPS = re.findall(r"<!-- place: (\S+) -->\n!\[(.+)\]\((view_\w+\.png)\)", TUTORIAL.read_text())


def test_the_tutorial_walks_where_it_says_and_its_pictures_are_made_here(
    browser: Browser, address: str, tmp_path: Path
) -> None:
    """RL_VLM_SCREENSHOTS=docs writes the pictures that the page shows."""
    assert len(STEPS) == 6
    out = Path(os.environ.get("RL_VLM_SCREENSHOTS", tmp_path))
    page = Opened(browser, address, 1200)
    for place, told, name in STEPS:
        page.go(place)
        text = page.page.locator("main").inner_text()
        view, _, _ = told.partition(":")
        assert view.lower() in text.lower(), told
        assert page.page.locator("main p.bad").count() == 0, (place, text[:500])
        page.page.set_viewport_size({"width": 1200, "height": 760})
        if told.startswith("Episode:"):
            page.page.set_viewport_size({"width": 1200, "height": 860})
            page.page.locator("[data-token]").nth(2).hover()
            assert "log-probability, learner" in page.page.locator(".panel").inner_text()
        page.page.wait_for_timeout(500)  # pictures are decoded
        with Image.open(io.BytesIO(page.page.screenshot())) as shot:
            assert len(shot.convert("RGB").getcolors(1 << 24) or ()) > 50, f"{name} is empty"
            shot.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(out / name, optimize=True)
        assert (ROOT / "docs" / name).exists(), f"make it: RL_VLM_SCREENSHOTS=docs pytest {__file__}"
    assert page.problems == []
    page.close()


# Every kind of run: recipe, overrides, and the views that it has.
KINDS = {
    "geo3k": (
        "geo3k_offline_tiny",
        ("algorithm.iterations=10", "evaluation.every=10", "evaluation.num_items=32"),
        VIEWS,
    ),
    "zoom": ("zoom_tiny", ("algorithm.iterations=30", "evaluation.every=15"), VIEWS),
    "mixture": ("mixture_tiny", ("algorithm.iterations=40", "evaluation.every=20"), VIEWS),
    "ppo": ("ppo_tiny", ("algorithm.iterations=20", "evaluation.every=10"), VIEWS),
    "cartpole": ("rl_vlm_f/cartpole_tiny", (), ("curves", "preferences", "system")),
}


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind, and a sweep; RL_VLM_KINDS_OF_RUNS names a folder that holds them already."""
    if given := os.environ.get("RL_VLM_KINDS_OF_RUNS"):
        return Path(given)
    folder = tmp_path_factory.mktemp("kinds")
    for name, (recipe, overrides, _) in KINDS.items():
        done = rl_vlm("train", recipe, *overrides, "--run-dir", folder / name, timeout=1500)
        assert done.returncode == 0, done.stderr
    command = [sys.executable, ROOT / "tune" / "compare_losses.py", "--quick", "--out", folder / "losses"]
    subprocess.run(command, env=environment(), check=True, timeout=1500)
    return folder


@pytest.mark.acceptance
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("width, scheme", [(1440, "light"), (390, "dark")])
def test_every_view_of_every_kind_of_run(
    browser: Browser, all_kinds: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    """RL_VLM_SCREENSHOTS keeps the pictures."""
    out = Path(os.environ.get("RL_VLM_SCREENSHOTS", tmp_path))
    with served(all_kinds) as address:
        page = Opened(browser, address, width, scheme)
        places = [("runs", "/")]
        for name, (_, _, views) in KINDS.items():
            places += [(f"{name}-{view}", f"/#/{view}/{name}") for view in views]
            if "groups" in views:
                listed = answer(address, f"runs/{name}/episodes")
                longest = max(
                    range(len(listed["id"])),
                    key=lambda k: (listed["kind"][k] == "train", listed["turns"][k], listed["id"][k]),
                )
                places += [(f"{name}-episode", f"/#/episodes/{name}?open={listed['id'][longest]}&colour=engine&grid=1")]
                places += [
                    (f"{name}-group", f"/#/groups/{name}?{httpx.QueryParams({'group': listed['group'][longest]})}")
                ]
        trial = next(line["id"] for line in answer(address, "runs")["runs"] if line["sweep"])
        for name, place in [*places, ("trial-curves", f"/#/curves/{trial}"), ("trial-system", f"/#/system/{trial}")]:
            page.go(place)
            page.page.screenshot(path=out / f"{name}-{width}.png", full_page=width < 1000 and "episodes" not in name)
            assert page.violations() == [], place
            assert not page.overflows(), place
            assert page.page.locator("main p.bad").count() == 0, place
        assert page.problems == []
        page.close()
