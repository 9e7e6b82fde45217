"""A worker of vLLM's CPU build for `test_vllm_rest.py`; vLLM imports it by name in its engine core."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class ForgetfulWorker(CPUWorker):
    """A CPU gives no memory back. This worker spoils all keys and values where a GPU's would be gone, and computes nothing until it is
    woken."""

    asleep = False

    def discard(self, tags: tuple[str, ...]) -> None:
        """Put huge numbers into the cache: whoever reads an old entry gets other tokens."""
        assert tags == ("kv_cache",)
        self.asleep = True
        for cache in self.model_runner.kv_caches:
            cache.fill_(1e4)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """New memory is not empty either."""
        assert tags == ["kv_cache"]
        self.asleep = False

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Only while the memory is there."""
        assert not self.asleep
        return super().execute_model(*args, **kwargs)
