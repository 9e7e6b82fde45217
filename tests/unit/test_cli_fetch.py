"""rl-vlm fetch: models and data sets of the hub, and clear words when they cannot be had."""

import os
import subprocess
import sys
import types

import pytest
from test_cli import failure, run


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for snapshot_download: returns `folder` or raises `error`."""
    import huggingface_hub

    def snapshot_download(name, **options):
        state.calls.append((name, options["repo_type"]))
        if state.error is not None:
            raise state.error
        return str(state.folder)

    state = types.SimpleNamespace(calls=[], error=None, folder=tmp_path / "snapshot")
    state.folder.mkdir()
    (state.folder / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return state


def hub_error(kind, status=404):
    import httpx
    from huggingface_hub import errors

    return getattr(errors, kind)(
        "no\nmore", response=httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    )


def test_fetch_converts_a_data_set_so_that_it_opens_offline(hub, monkeypatch):
    import datasets

    loaded = []
    monkeypatch.setattr(datasets, "load_dataset", loaded.append)
    assert run("fetch", "owner/data", "--data") == 0
    assert hub.calls == [("owner/data", "dataset")] and loaded == ["owner/data"]


@pytest.mark.parametrize("name", ["model", "./folder", "a/b/c", "/absolute/path", "owner/bad name"])
def test_fetch_refuses_what_is_no_name(name, hub, capsys):
    from huggingface_hub.errors import HFValidationError

    hub.error = HFValidationError("Repo id must use alphanumeric chars")
    assert run("fetch", name) == 2
    assert "not a name of the hub" in failure(capsys)


def test_fetch_says_what_went_wrong(hub, monkeypatch, capsys):
    from huggingface_hub.errors import LocalEntryNotFoundError

    cases = [
        (hub_error("RepositoryNotFoundError"), 2, "The hub has no model"),
        (hub_error("GatedRepoError", 403), 2, "licence"),
        (hub_error("HfHubHTTPError", 500), 1, "broke off"),
        (LocalEntryNotFoundError("offline"), 1, "cannot be reached"),
        (OSError(28, "No space left on device"), 1, "No space left"),
    ]
    for hub.error, code, words in cases:
        assert run("fetch", "owner/model") == code
        assert words in failure(capsys)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.error = LocalEntryNotFoundError("offline")
    assert run("fetch", "owner/model") == 2
    assert "HF_HUB_OFFLINE is set" in failure(capsys)


def test_fetch_without_a_network_ends_soon(tmp_path):
    code = "from rl_vlm.cli import app as cli; import sys; sys.exit(cli.run(['fetch', 'owner/model']))"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: The hub cannot be reached"), done.stderr
