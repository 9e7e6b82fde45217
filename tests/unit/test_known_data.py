"""`rl-vlm fetch --data` of the environments' data sets, from a hub that a test runs: what is written is what the environments read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import Hub
from test_data import png

from rl_vlm.envs.registry import make

pytestmark = pytest.mark.slow

# One process for many commands: it answers each line, a list of arguments, with the exit code and what was printed.
COMMANDS = """
import contextlib, io, json, sys
from rl_vlm.cli import app
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def picture(number: int) -> bytes:
    return png((number % 256, 99, 0), (40, 30), "JPEG")


def image(number: int) -> dict[str, Any]:
    return {"bytes": picture(number), "path": f"{number}.jpg"}


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def archive(numbers: range) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        for number in numbers:
            written.writestr(f"00/{number}.jpg", picture(number))
    return buffer.getvalue()


def filled() -> Hub:
    hub = Hub()
    hub.files = {
        "hiyouga/geometry3k": {
            f"data/{split}-00000-of-00001.parquet": parquet(
                [{"images": [image(n)], "problem": f"<image>Find {split} {n}.", "answer": str(n)} for n in range(5)]
            )
            for split in ("train", "validation", "test")
        },
        "lmms-lab/NLVR2": {
            f"data/{name}-0000{shard}-of-00002-abc.parquet": parquet(
                [
                    {"question": f"{name} {shard} {n}", "left_image": image(n), "right_image": image(n + 1), "label": str(n % 2 == 0)}
                    for n in range(4)
                ]
            )
            for name in ("unbalanced_dev", "balanced_dev", "balanced_test_public")
            for shard in range(2)
        },
        "lmms-lab/flickr30k": {
            f"data/test-0000{shard}-of-00003.parquet": parquet(
                [{"image": image(n), "caption": [f"a dog {shard} {n}", "an animal"], "img_id": str(n)} for n in range(3)]
            )
            for shard in range(3)
        },
        "osv5m/osv5m": {
            **{f"images/{split}/00.zip": archive(range(1000, 1010)) for split in ("train", "test")},
            **{
                f"{split}.csv": b"id,latitude,longitude,thumb_original_url,country,region,sub-region,city\n"
                + "".join(f"{n},-4{n % 10}.5,{1.25 if split == 'train' else 1.5},,NZ,Otago,,Oamaru\n" for n in range(1009, 990, -1)).encode()
                for split in ("train", "test")
            },
        },
    }  # fmt: skip
    return hub


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    hub = filled()
    with hub.running() as hub.url:
        yield hub


class Commands:
    """rl-vlm in a process whose hub is the test's."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "RL_VLM_CACHE": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1"
        }  # fmt: skip
        environment.pop("HF_HUB_OFFLINE", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def fetch(self, *arguments: str) -> tuple[int, str, str]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(["fetch", *arguments]) + "\n")
        self._process.stdin.flush()
        code, out, err = json.loads(self._process.stdout.readline())
        return code, out.strip(), err

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(900)


@pytest.fixture(scope="module")
def commands(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(hub, tmp_path_factory.mktemp("fetched"))
    yield commands
    commands.end()


def test_geometry_problems_open_in_their_environment(commands: Commands) -> None:
    code, folder, err = commands.fetch("geo3k", "--data")
    assert code == 0, err
    env = make("Geo3k-v0", data=folder)
    assert (env.num_items("train"), env.num_items("test")) == (5, 5)
    observation, _ = env.reset(options={"index": 3, "split": "test"})
    assert "Find test 3." in observation.messages[-1].text and len(observation.messages[-1].images) == 1


def test_sentences_take_as_many_files_as_rows_need(commands: Commands, hub: Hub) -> None:
    code, folder, err = commands.fetch("nlvr2", "--data", "--max-rows", "3")
    assert code == 0, err
    env = make("NLVR2-v0", data=folder)
    assert (env.num_items("train"), env.num_items("test")) == (3, 3)
    observation, _ = env.reset(options={"index": 2, "split": "train"})
    assert "unbalanced_dev 0 2" in observation.messages[-1].text
    assert not hub.sent["data/unbalanced_dev-00001-of-00002-abc.parquet"]
    _, further, _ = commands.fetch("nlvr2", "--data", "--max-rows", "6")
    assert further != folder and make("NLVR2-v0", data=further).num_items("train") == 6


def test_what_is_there_is_not_fetched_again(commands: Commands, hub: Hub) -> None:
    first = commands.fetch("flickr30k", "--data")
    env = make("Caption-v0", data=first[1])
    assert (env.num_items("train"), env.num_items("test")) == (6, 3)  # the last file is the test split
    *_, info = env.step("") if env.reset(options={"index": 0, "split": "test"}) else ()
    assert info["reference"] == "a dog 2 0"
    sent = hub.sent.total()
    assert commands.fetch("flickr30k", "--data")[:2] == first[:2] and hub.sent.total() == sent


def test_street_views_are_read_out_of_their_archive(commands: Commands) -> None:
    code, folder, err = commands.fetch("osv5m", "--data", "--max-rows", "4")
    assert code == 0, err
    env = make("GeoSpot-v0", data=folder)
    assert env.num_items("train") == env.num_items("test") == 4
    rows = pq.read_table(Path(folder) / "train.parquet").to_pylist()
    assert [row["latitude"] for row in rows] == [-40.5, -41.5, -42.5, -43.5]
    assert {(row["country"], row["region"], row["city"], row["longitude"]) for row in rows} == {
        ("NZ", "Otago", "Oamaru", 1.25)
    }
    assert rows[2]["image"]["bytes"] == picture(1002)


def test_a_download_that_breaks_off_says_so_and_goes_on(hub: Hub, tmp_path: Path) -> None:
    commands, file = Commands(hub, tmp_path), "data/test-00000-of-00001.parquet"
    hub.breaks = {file}
    outcomes = [commands.fetch("geo3k", "--data") for _ in range(2)]
    commands.end()
    if outcomes[0][0]:  # the client may have gone on by itself
        assert outcomes[0][0] == 1 and "broke off" in outcomes[0][2] and not outcomes[0][1]
    assert outcomes[1][0] == 0 and pq.read_table(Path(outcomes[1][1]) / "test.parquet").num_rows == 5
    assert not list(Path(outcomes[1][1]).glob(".*"))  # no draft is left


def test_a_hub_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    hub = Hub()
    hub.url = "http://127.0.0.1:9"
    commands = Commands(hub, tmp_path)
    for words in (("geo3k", "--data"), ("osv5m", "--data"), ("owner/name", "--data"), ("owner/model",)):
        code, out, err = commands.fetch(*words)
        assert (code, out) == (1, "") and "The hub cannot be reached to fetch" in err and "Traceback" not in err
    commands.end()


# --- Downloads from a stand-in for the hub


PLANNED = "import sys; from rl_vlm.runs.memory import shape_of; print(shape_of(sys.argv[1]).parameters)"
CONFIGS = json.loads((Path(__file__).parents[1] / "fixtures/qwen3_vl.json").read_text())


def test_a_plan_fetches_the_configuration_alone(tmp_path: Path) -> None:
    hub = Hub()
    hub.files["owner/model"] = {"config.json": json.dumps(CONFIGS["2b"]).encode(), "model.safetensors": b"weights"}
    with hub.running() as url:
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", PLANNED, "owner/model"], env=environment, capture_output=True, text=True, timeout=300
        )
    assert (done.stdout.strip(), set(hub.sent)) == ("2127532032", {"config.json"}), done.stderr
