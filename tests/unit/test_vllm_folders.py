"""Where versions lie for vLLM: in memory where there is enough of it, and nothing stays of one that did not fit. Without vLLM."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.vllm_weights import FullVersions
from rl_vlm.models.weights import FullPayload


def test_weights_that_do_not_fit_are_an_error_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        plain(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    versions = FullVersions(None, None)
    try:
        payload = FullPayload.build(1, {"a": torch.ones(64)}, "base")
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(EngineError, match="No space left"):
            versions._write(payload)
        assert not list(versions.root.iterdir())
        monkeypatch.undo()
        assert versions._write(payload).is_file()
    finally:
        versions.close()
