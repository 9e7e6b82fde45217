"""rl-vlm export, model, envs and doctor: what they hand on and print."""

import json
from pathlib import Path

from test_cli import output, run


def test_export_hands_on_its_arguments(tmp_path, monkeypatch, capsys):
    import rl_vlm.models.export as export

    calls = []
    monkeypatch.setattr(export, "export_model", lambda *arguments: calls.append(arguments) or arguments[1])
    assert run("export", "run", tmp_path / "out", "--model", "tiny", "--overwrite") == 0
    assert calls == [(Path("run"), tmp_path / "out", "tiny", True)]
    assert str(tmp_path / "out") in output(capsys)


def test_make_tiny_replaces_a_model_only_on_demand(tmp_path, monkeypatch, capsys):
    from rl_vlm.zoo.tiny import model as tiny

    def build(folder, seed, variant):
        folder.mkdir()
        (folder / "config.json").write_text(str(seed))
        return folder

    monkeypatch.setattr(tiny, "make_tiny", build)
    monkeypatch.setattr(tiny, "tiny_model_path", lambda seed, variant: tmp_path / f"cached-{seed}")
    folder = tmp_path / "models" / "tiny"
    assert run("model", "make-tiny", folder) == 0
    assert run("model", "make-tiny", folder, "--seed", 5) == 2
    assert (folder / "config.json").read_text() == "0"
    assert run("model", "make-tiny", folder, "--seed", 5, "--overwrite") == 0
    assert (folder / "config.json").read_text() == "5"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    capsys.readouterr()
    assert run("model", "make-tiny", "--seed", 7) == 0
    assert output(capsys).strip() == str(tmp_path / "cached-7")
    assert run("model", "make-tiny", "--overwrite") == 2


def test_envs_lists_ids_descriptions_and_sizes(capsys):
    assert run("envs", "--json") == 0
    entries = {entry["id"]: entry for entry in json.loads(output(capsys))}
    assert entries["Shapes-v0"]["num_items"] == {"train": 4096, "test": 512}
    assert entries["GridWalk-v0"]["num_items"] == {"train": 4096, "test": 512}
    for drawn in ("NLVR2-v0", "Caption-v0", "Geo3k-v0"):
        assert entries[drawn]["num_items"] == {"train": 16384, "test": 512}
    assert "geometry" in entries["Geo3k-v0"]["description"].lower()
    assert run("envs") == 0
    assert "Shapes-v0 A drawing" in " ".join(output(capsys).split())


def test_an_environment_that_cannot_be_imported_is_listed_as_such(monkeypatch, capsys):
    from rl_vlm.envs import registry

    monkeypatch.setitem(registry._REGISTRY, "Broken-v0", "no.such.module:Env")
    assert run("envs") == 0
    assert "Broken-v0 cannot be used" in " ".join(output(capsys).split())


def test_doctor_exits_with_1_when_something_fails(monkeypatch, capsys):
    from rl_vlm.cli import doctor
    from rl_vlm.cli.doctor import Check

    checks = [Check("torch", "ok", "2.13.0"), Check("ray", "warn", "old", "Upgrade.")]
    monkeypatch.setattr(doctor, "diagnose", lambda run: checks)
    assert run("doctor") == 0
    said = output(capsys)
    assert "ok   torch  2.13.0" in said and "warn ray    old" in said and "→ Upgrade." in said
    assert run("doctor", "--json") == 0
    assert json.loads(output(capsys))["status"] == "warn"
    checks.append(Check("gpu", "fail", "gone", "Plug it in."))
    assert run("doctor") == 1
