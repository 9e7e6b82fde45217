"""Replies of a hostile endpoint are failed questions: they end no command, ignore no deadline and lose no label."""

import asyncio
import csv
import gzip
import io
import json
import time
import zlib

import httpx
import numpy as np
import pytest
from image_corpus import encoded

from rl_vlm.asking.endpoints import EndpointError, Question
from rl_vlm.asking.http_endpoints import GenerateEndpoint, OpenAIEndpoint
from rl_vlm.config.labels import EndpointSection
from rl_vlm.labelling import folder as label_folders
from rl_vlm.labelling.folder import label_folder
from rl_vlm.labelling.store import COLUMNS, Label, Labeller, Segment, SegmentPair, log_row, query_log
from rl_vlm.types import Message, UserInputError

CHOICES = ("0", "1", "-1")


def ask(reply, kind=OpenAIEndpoint, choices=CHOICES):
    def answer(_):
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, content=reply)

    endpoint = kind(EndpointSection(url="http://127.0.0.1:9/v1"), transport=httpx.MockTransport(answer))

    async def once():
        async with endpoint.open() as question:
            return await question(Question((Message.of("user", "?"),), 8, choices=choices))

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


@pytest.mark.parametrize("kind", [OpenAIEndpoint, GenerateEndpoint])
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
def test_what_is_no_reply_is_a_failed_question(kind, reply):
    with pytest.raises(EndpointError) as caught:
        ask(reply, kind)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_a_reply_that_unpacks_to_gigabytes_is_cut(encoding):
    plain = b'{"text": "' + b"a" * (200 * 2**20)
    packed = gzip.compress(plain, 1) if "gzip" in encoding else zlib.compress(plain, 1)
    assert len(packed) < 2**20 * 2
    headers = {"content-encoding": encoding}
    with pytest.raises(EndpointError, match="more than 1048576 bytes|cannot be unpacked"):
        ask(httpx.Response(200, headers=headers, stream=Stream(packed)), GenerateEndpoint)


class Stream(httpx.AsyncByteStream):
    """A reply in pieces, not unpacked by the test's own transport."""

    def __init__(self, data):
        self._data = data

    async def __aiter__(self):
        for start in range(0, len(self._data), 65_536):
            yield self._data[start : start + 65_536]


def test_a_reply_in_pieces_is_read():
    assert ask(httpx.Response(200, stream=Stream(b'{"text": "fine"}')), GenerateEndpoint).text == "fine"


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
    assert [row["first"] for row in rows] == [f"first_{number:03}.png" for number in range(4)]
    done = label_folder(tmp_path, Dies(3), tmp_path / "log.csv")
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
    part = Segment(np.zeros((1, 0), np.float32), np.zeros((1, 0), np.float32), np.ones(1, np.float32), None)
    log = query_log(tmp_path / "log.csv")
    for iteration in (1, 2, 3):
        log.add(log_row(SegmentPair(part, part), Label(0, text="word " * 30_000), iteration, time.time()))
    with (tmp_path / "log.csv").open("a") as file:  # as an earlier version wrote it
        file.write(",".join(["1", "1", "0", "1.0", "2", "given", "", "", "", "", "1", "", "x" * 140_000]) + "\n")
    log.rewind(2)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[0] == ",".join(COLUMNS)
