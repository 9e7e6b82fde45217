"""Secrets and control characters from elsewhere reach neither terminals, nor logs, nor files."""

import asyncio
import csv
import io
import logging

import httpx
import numpy as np
import pytest
from fuzzing import patient
from hypothesis import given
from hypothesis import strategies as st

from rl_vlm import safe_text
from rl_vlm.asking.endpoints import EndpointError, Question
from rl_vlm.asking.http_endpoints import GenerateEndpoint, OpenAIEndpoint
from rl_vlm.cli.output import ErrorReport, _StderrHandler
from rl_vlm.config.labels import EndpointSection
from rl_vlm.labelling.store import Label, LabelStore, Segment, SegmentPair, log_row, query_log
from rl_vlm.safe_text import child_environment, csv_cell, printable, redact
from rl_vlm.types import Message, RLVLMError, UserInputError

TOKEN = "sk-a-long-secret-0123456789"
ESCAPE = "\x1b]0;owned\x07\x9b31m\u202eevil\r"


def pair():
    empty = np.zeros((1, 0), np.float32)
    part = Segment(empty, empty, np.array([1.0], np.float32), None)
    return SegmentPair(part, part)


def ask(endpoint):
    async def once():
        async with endpoint.open() as question:
            return await question(Question((Message.of("user", "?"),), 8))

    return asyncio.run(once())


def echo(request):
    return httpx.Response(400, text=f"bad headers: {dict(request.headers)} for {request.url}")


@pytest.mark.parametrize("variable", ["RL_VLM_LABEL_TOKEN", "LABELLER"])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_an_endpoint_that_sends_the_token_back_does_not_get_it_into_a_message(monkeypatch, variable, ending):
    monkeypatch.setenv(variable, TOKEN + ending)
    settings = EndpointSection(url="http://user:hunter2hunter2@127.0.0.1:9/v1", token_env=variable)
    with pytest.raises(EndpointError) as caught:
        ask(OpenAIEndpoint(settings, transport=httpx.MockTransport(echo)))
    assert "bad headers" in str(caught.value)
    assert TOKEN not in str(caught.value) and "hunter2" not in str(caught.value)
    log = str(log_row(pair(), Label(-1, text=f"I saw {TOKEN}", error=str(caught.value)), 0, 0.0))
    assert TOKEN not in log and "hunter2" not in log


def test_a_token_that_no_header_can_hold_is_an_error_that_does_not_show_it(monkeypatch):
    for bad in (f"{TOKEN}\nX-Evil: 1", f"{TOKEN}\x1b", f"{TOKEN}é"):
        monkeypatch.setenv("RL_VLM_LABEL_TOKEN", bad)
        with pytest.raises(UserInputError, match="printable ASCII") as caught:
            ask(GenerateEndpoint(EndpointSection(url="http://127.0.0.1:9/generate")))
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
    names = (
        "RL_VLM_API_TOKEN",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "DB_PASSWORD",
    )
    for name in names:
        monkeypatch.setenv(name, TOKEN)
    for name in ("TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL", "RAY_AUTH_MODE", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "value")
    found = child_environment(["HF_TOKEN"], EXTRA="1")
    assert found["HF_TOKEN"] == TOKEN
    assert {name for name in names if name in found} == {"HF_TOKEN"}
    assert {
        "TOKENIZERS_PARALLELISM",
        "CUDA_VISIBLE_DEVICES",
        "MUJOCO_GL",
        "RAY_AUTH_MODE",
        "SSH_AUTH_SOCK",
        "EXTRA",
    } <= {*found}


def test_short_values_and_words_are_not_taken_for_secrets(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "true")
    assert (
        redact("it is true that https://host/path?x=1 and a@b.c") == "it is true that https://host/path?x=1 and a@b.c"
    )
    assert safe_text.redact("Authorization: Bearer abcdefgh123") == "Authorization: Bearer ***"
