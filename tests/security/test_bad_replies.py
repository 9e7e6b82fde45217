"""Replies of a hostile endpoint are failed questions: they end no command, ignore no deadline and lose no label."""

import asyncio
import csv
import gzip
import io
import json
import logging
import time
import zlib

import httpx
import numpy as np
import pytest
from fuzzing import patient
from hypothesis import given
from hypothesis import strategies as st
from image_corpus import encoded

from rl_vlm import safe_text
from rl_vlm.asking import EndpointError, Question
from rl_vlm.asking.http import HTTPEndpoint
from rl_vlm.cli.output import ErrorReport, _StderrHandler
from rl_vlm.config.labels import EndpointSection
from rl_vlm.labelling import folder as label_folders
from rl_vlm.labelling.folder import label_folder
from rl_vlm.labelling.labels import Label, Labeller, Segment, SegmentPair
from rl_vlm.labelling.query_log import COLUMNS, log_row, query_log
from rl_vlm.labelling.store import LabelStore
from rl_vlm.safe_text import child_environment, csv_cell, printable, redact
from rl_vlm.types import Message, RLVLMError, UserInputError

CHOICES = ("0", "1", "-1")


def ask(reply, plain=False):
    def answer(_):
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, content=reply)

    settings = EndpointSection(url="http://127.0.0.1:9/v1")
    return ask_endpoint(HTTPEndpoint(settings, plain, httpx.MockTransport(answer)), choices=CHOICES)


def ask_endpoint(endpoint, **more):
    async def once():
        async with endpoint.open() as question:
            return await question(Question((Message.of("user", "?"),), 8, **more))

    return asyncio.run(once())


def completion(text="1", logprob="-0.1", usage='{"prompt_tokens": 3}'):
    first = f'{{"top_logprobs": [{{"token": "1", "logprob": {logprob}}}]}}'
    message = json.dumps({"content": text})
    return f'{{"choices": [{{"message": {message}, "logprobs": {{"content": [{first}]}}}}], "usage": {usage}}}'.encode()


@pytest.mark.parametrize("logprob", ["800", "1e400", "NaN", "Infinity", '"800"', "null", "[]"])
def test_a_log_probability_that_is_none_is_a_failed_question(logprob):
    with pytest.raises(EndpointError, match="no chat completion"):
        ask(completion(logprob=logprob))


def test_a_log_probability_of_zero_or_of_minus_infinity_is_one():
    assert ask(completion(logprob="0.0")).probabilities["1"] == 1
    assert ask(completion(logprob="-Infinity")).probabilities is None


@pytest.mark.parametrize("count", ["1e400", "-1e400", "NaN", "-5", "true", '"x"', "[]", "1" + "0" * 300])
def test_a_count_of_tokens_that_is_none_counts_as_none(count):
    answer = ask(completion(usage=f'{{"prompt_tokens": {count}, "completion_tokens": 7}}'))
    assert (answer.prompt_tokens, answer.sampled_tokens) == (0, 7)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        b'{"choices": ' + b"[" * 100_000,
        b'{"text": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b"[]",
        b"1" * 5000,
        b"\xff\xfe",
        completion("x" * (2**20 + 1)) + b"",
        json.dumps({"text": "x" * (2**20 + 1)}).encode(),
        b"{}" + b" " * (9 * 2**20),
    ],
)
def test_what_is_no_reply_is_a_failed_question(plain, reply):
    with pytest.raises(EndpointError) as caught:
        ask(reply, plain)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_a_reply_that_unpacks_to_much_more_is_cut(encoding):
    plain = b'{"text": "' + b"a" * (32 * 2**20)
    packed = gzip.compress(plain, 1) if "gzip" in encoding else zlib.compress(plain, 1)
    assert len(packed) < 2**20 * 2
    headers = {"content-encoding": encoding}
    with pytest.raises(EndpointError, match="more than 1048576 bytes|cannot be unpacked"):
        ask(httpx.Response(200, headers=headers, stream=Stream(packed)), plain=True)


class Stream(httpx.AsyncByteStream):
    """A reply in pieces, not unpacked by the test's own transport."""

    def __init__(self, data):
        self._data = data

    async def __aiter__(self):
        for start in range(0, len(self._data), 65_536):
            yield self._data[start : start + 65_536]


def test_a_reply_in_pieces_is_read():
    assert ask(httpx.Response(200, stream=Stream(b'{"text": "fine"}')), plain=True).text == "fine"


def pairs(folder, count):
    for number in range(count):
        for side in ("first", "second"):
            (folder / f"{side}_{number:03}.png").write_bytes(encoded("PNG", 8 + number % 2 + (side == "second")))


class Dies(Labeller):
    """Answers some calls, then fails in a way that nobody expected."""

    def __init__(self, calls):
        self.calls = calls

    async def label(self, asked):
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("unexpected")
        return [Label(1, text="paid") for _ in asked]


def test_labels_that_were_paid_for_are_in_the_file_when_a_later_batch_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(label_folders, "_PAIRS_PER_CALL", 2)
    pairs(tmp_path, 5)
    with pytest.raises(RuntimeError):
        label_folder(tmp_path, Dies(2), tmp_path / "log.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "log.csv").read_text())))
    assert [row["first"] for row in rows] == [f"first_{number:03}.png" for number in range(3)]
    done = label_folder(tmp_path, Dies(4), tmp_path / "log.csv")
    assert done["pairs"] == 5 and done["labels"]["1"] == 5
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "log.csv").read_text())))) == 5


def test_pictures_are_read_when_they_are_labelled_and_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(label_folders, "_PIXELS_PER_CALL", 400)
    pairs(tmp_path, 6)
    sizes = []

    class Counts(Dies):
        async def label(self, asked):
            sizes.append(len(asked))
            return await super().label(asked)

    label_folder(tmp_path, Counts(10), tmp_path / "log.csv")
    assert sum(sizes) == 6 and max(sizes) <= 2
    (tmp_path / "first_003.png").write_bytes(b"damaged")
    with pytest.raises(UserInputError, match="first_003.png"):
        label_folder(tmp_path, Counts(10), tmp_path / "log.csv")


def test_a_log_with_a_long_answer_can_be_continued(tmp_path):
    log = query_log(tmp_path / "log.csv")
    for iteration in (1, 2, 3):
        log.add(log_row(pair(), Label(0, text="word " * 30_000), iteration, time.time()))
    with (tmp_path / "log.csv").open("a") as file:  # as an earlier version wrote it
        file.write(",".join(["1", "1", "0", "1.0", "2", "given", "", "", "", "", "1", "", "x" * 140_000]) + "\n")
    log.rewind(2)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[0] == ",".join(COLUMNS)


# --- Secrets and control characters from elsewhere reach neither terminals, nor logs, nor files


TOKEN = "sk-a-long-secret-0123456789"
ESCAPE = "\x1b]0;owned\x07\x9b31m\u202eevil\r"


def pair():
    empty = np.zeros((1, 0), np.float32)
    part = Segment(empty, empty, np.array([1.0], np.float32), None)
    return SegmentPair(part, part)


def echo(request):
    return httpx.Response(400, text=f"bad headers: {dict(request.headers)} for {request.url}")


@pytest.mark.parametrize("variable", ["RL_VLM_LABEL_TOKEN", "LABELLER"])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_an_endpoint_that_sends_the_token_back_does_not_get_it_into_a_message(monkeypatch, variable, ending):
    monkeypatch.setenv(variable, TOKEN + ending)
    settings = EndpointSection(url="http://user:hunter2hunter2@127.0.0.1:9/v1", token_env=variable)
    with pytest.raises(EndpointError) as caught:
        ask_endpoint(HTTPEndpoint(settings, transport=httpx.MockTransport(echo)))
    assert "bad headers" in str(caught.value)
    assert TOKEN not in str(caught.value) and "hunter2" not in str(caught.value)
    log = str(log_row(pair(), Label(-1, text=f"I saw {TOKEN}", error=str(caught.value)), 0, 0.0))
    assert TOKEN not in log and "hunter2" not in log


def test_a_token_that_no_header_can_hold_is_an_error_that_does_not_show_it(monkeypatch):
    for bad in (f"{TOKEN}\nX-Evil: 1", f"{TOKEN}\x1b", f"{TOKEN}é"):
        monkeypatch.setenv("RL_VLM_LABEL_TOKEN", bad)
        with pytest.raises(UserInputError, match="printable ASCII") as caught:
            ask_endpoint(HTTPEndpoint(EndpointSection(url="http://127.0.0.1:9/generate"), plain=True))
        assert TOKEN not in str(caught.value)


def test_label_store_log_and_traceback_hold_no_token(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_API_KEY", TOKEN)
    store = LabelStore(tmp_path / "labels")
    store.append([pair()], [Label(-1, text=f"key {TOKEN}", error=f"header {TOKEN}")], step=0, time=0.0)
    (found,) = store.read(1)[1]
    assert TOKEN not in found.text
    report = ErrorReport()
    report.folder = tmp_path
    assert report.report(ValueError(f"wrong {TOKEN}{ESCAPE}")) == 1
    handler = _StderrHandler()
    handler.emit(logging.LogRecord("rl_vlm", logging.INFO, "", 0, f"said {TOKEN}{ESCAPE}", None, None))
    shown = capsys.readouterr().err
    assert "wrong" in shown and "said" in shown
    for text in (shown, (tmp_path / "error.log").read_text()):
        assert TOKEN not in text
    assert not set(shown) & set("\x1b\x07\x9b\u202e\r")


def test_every_error_of_the_package_is_printable():
    message = str(UserInputError(f"column {ESCAPE} is missing\nnext line"))
    assert message.startswith("column \\x1b]0;owned\\x07\\x9b31m\\u202eevil\\x0d is missing\nnext line")
    assert RLVLMError("plain", 3).args == ("plain", 3)


@pytest.mark.slow
@patient
@given(st.text())
def test_printable_text_has_no_controls_and_is_otherwise_unchanged(text):
    shown = printable(text)
    assert printable(shown) == shown
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    if shown.isascii() and text.isprintable():
        assert shown == text


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+cmd", "@SUM(A1)", "-2+3+cmd", " =1+1", "\t=1", '"=1+1"'])
def test_a_cell_that_a_spreadsheet_would_run_is_quoted(text):
    cells = log_row(pair(), Label(0, text=text), 0, 0.0, text)
    assert cells[-1].startswith("'") and cells[-2].startswith("'")


@pytest.mark.parametrize("text", ["-1", "0.5", "-1.5e-3", "1", "-1 -1", "Image 2 is better.", "a=b", ""])
def test_ordinary_cells_stay_as_they_are(text):
    assert csv_cell(text) == text


def test_a_log_holds_no_escape_and_no_cell_that_python_refuses(tmp_path):
    long = f"first {ESCAPE}" + "x" * 500_000
    query_log(tmp_path / "log.csv").add(log_row(pair(), Label(0, text=long), 0, 0.0))
    row = (tmp_path / "log.csv").read_text()
    cells = list(csv.reader(io.StringIO(row)))
    assert len(cells) == 2 and "500" in cells[1][-1][-30:] and "\x1b" not in row


def test_child_processes_get_no_tokens(monkeypatch):
    names = [
        "RL_VLM_API_TOKEN",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "DB_PASSWORD",
    ]
    harmless = ["TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL", "RAY_AUTH_MODE", "SSH_AUTH_SOCK"]
    for name in names:
        monkeypatch.setenv(name, TOKEN)
    for name in harmless:
        monkeypatch.setenv(name, "value")
    found = child_environment(["HF_TOKEN"], EXTRA="1")
    assert found["HF_TOKEN"] == TOKEN
    assert {name for name in names if name in found} == {"HF_TOKEN"}
    assert {*harmless, "EXTRA"} <= {*found}


def test_short_values_and_words_are_not_taken_for_secrets(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "true")
    assert (
        redact("it is true that https://host/path?x=1 and a@b.c") == "it is true that https://host/path?x=1 and a@b.c"
    )
    assert safe_text.redact("Authorization: Bearer abcdefgh123") == "Authorization: Bearer ***"
