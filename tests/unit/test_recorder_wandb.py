"""Weights & Biases: used when its key is set, never in the way of a run."""

import json
import sys
import types

from recorder_support import QUIET, rows

from rl_vlm.monitoring.recorder import RunRecorder


class FakeWandb(types.ModuleType):
    """The part of wandb's interface that is used; `failures` calls of `init` fail as without a network."""

    class Error(Exception):
        pass

    def __init__(self, failures: int = 0) -> None:
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(Error=self.Error)
        self.failures, self.inits, self.logged, self.finished = failures, [], [], 0

    def Settings(self, **kwargs):
        return kwargs

    def init(self, **kwargs):
        self.inits.append(kwargs)
        if self.failures:
            self.failures -= 1
            raise self.Error("no network")
        return self

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, metrics):
        self.logged.append(metrics)

    def finish(self):
        self.finished += 1


def with_wandb(monkeypatch, **kwargs) -> FakeWandb:
    fake = FakeWandb(**kwargs)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_metrics_go_to_wandb_when_its_key_is_set(tmp_path, monkeypatch):
    fake = with_wandb(monkeypatch)
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.log_iteration(1, {"reward/mean": 0.5})
    recorder.finish({"status": "done"})
    recorder.close()
    assert fake.logged == [{"iteration": 1, "reward/mean": 0.5}] and fake.finished == 1
    assert "secret" not in json.dumps(fake.inits, default=str)
    RunRecorder(tmp_path, QUIET, resumed_iteration=1)
    assert fake.inits[0]["id"] == fake.inits[1]["id"]


def test_wandb_without_a_network_works_offline(tmp_path, monkeypatch):
    fake = with_wandb(monkeypatch, failures=1)
    RunRecorder(tmp_path, QUIET).log_iteration(1, {"a": 1})
    assert fake.inits[1]["mode"] == "offline" and len(fake.logged) == 1


def test_wandb_that_fails_altogether_is_warned_of_and_left_out(tmp_path, monkeypatch, caplog):
    with_wandb(monkeypatch, failures=2)
    RunRecorder(tmp_path, QUIET).log_iteration(1, {"a": 1})
    assert "Weights & Biases is off" in caplog.text


def test_a_failing_wandb_call_does_not_fail_the_run(tmp_path, monkeypatch):
    fake = with_wandb(monkeypatch)
    monkeypatch.setattr(fake, "log", lambda _: 1 / 0)
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.log_iteration(1, {"a": 1})
    assert recorder.write_errors == 1 and rows(tmp_path)
