"""Supervised training: the loss is TRL's, the adapter is peft's, a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import plain_model, processor, reference_logits
from peft import PeftModel, get_peft_model

from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.config import load_sft_config
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.lora import load_lora_state, lora_state
from rl_vlm.ownership import files_in, run_files
from rl_vlm.supervised.dataset import open_job_data
from rl_vlm.supervised.trainer import SFTTrainer, learning_rate
from rl_vlm.types import Trajectory

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "sft_tiny.yaml"


def job(folder: Path, *overrides: str) -> Any:
    return load_sft_config(None, [f"model.path={folder}", "learner.lr=1e-2", "sft.batch_size=8", *overrides])


def policy_of(settings: Any, scale: float = 0.1) -> PolicyModel:
    """A policy whose adapter already does something."""
    policy = PolicyModel(Path(settings.model.path), settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.normal_(0.0, scale, generator=generator)
    return policy


def batch_of(settings: Any, policy: PolicyModel, step: int = 0) -> list[Trajectory]:
    return open_job_data(settings, policy.text).batch(step)


# --- the loss


def trl_trainer(folder: Path, policy: PolicyModel, rows: list[dict[str, Any]], out: Path) -> Any:
    import trl
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    message = List({"role": Value("string"), "content": Value("string")})
    features = Features({"prompt": message, "completion": message, "images": List(ImageFeature())})
    model = get_peft_model(plain_model(folder), policy.lora)
    load_lora_state(model.base_model.model, lora_state(policy.model))
    arguments = trl.SFTConfig(
        output_dir=str(out), per_device_train_batch_size=len(rows), max_length=None, use_cpu=True, report_to="none",
        gradient_checkpointing=False, bf16=False, completion_only_loss=True, loss_type="nll",
    )  # fmt: skip
    return trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows, features=features),
        processing_class=processor(folder),
    )


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [8192, 60])
def test_loss_and_gradient_equal_those_of_trl(micro_batch_tokens: int, tiny_folder: Path, tmp_path: Path) -> None:
    settings = job(tiny_folder, f"learner.micro_batch_tokens={micro_batch_tokens}")
    policy = policy_of(settings)
    data = open_job_data(settings, policy.text)
    conversations = data.train.conversations(range(8))
    rows = [
        {
            "prompt": [{"role": "user", "content": one.messages[0].text}],
            "completion": [{"role": "assistant", "content": one.messages[-1].text}],
            "images": [one.messages[0].images[0].to_pil()],
        }
        for one in conversations
    ]
    trainer = trl_trainer(tiny_folder, policy, rows, tmp_path)
    inputs = next(iter(trainer.get_train_dataloader()))
    # The template writes a line end after the end of a turn, which no engine samples and we do not train on.
    labels = inputs["labels"]
    after_end = torch.zeros_like(labels, dtype=torch.bool)
    after_end[:, 1:] = inputs["input_ids"][:, :-1] == policy.text.codec.end_of_turn_id
    labels[after_end] = -100
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()
    expected = expected.detach()
    theirs = {
        name.replace(".default", "").removeprefix("base_model.model."): parameter.grad
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    ours: dict[str, torch.Tensor] = {}

    sft = SFTTrainer(policy, settings)
    strategy_step = sft._strategy.step

    def keep_gradients(max_norm: float) -> float | None:
        for name, parameter in policy.model.named_parameters():
            if parameter.grad is not None:
                ours[name.replace(".default", "")] = parameter.grad.clone()
        return strategy_step(max_norm)

    sft._strategy.step = keep_gradients  # type: ignore[method-assign]
    batch = [data.encoder.encode(one) for one in conversations]
    loss, targets, _ = sft.step(batch, lr=1e-3)
    assert targets == int((labels[:, 1:] != -100).sum())
    assert loss == pytest.approx(float(expected), abs=1e-4)
    assert ours.keys() == theirs.keys() and len(ours) == 28
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-4, rtol=1e-3)
    assert max(float(gradient.abs().max()) for gradient in ours.values()) > 1e-3


def test_the_loss_of_several_turns_is_that_of_every_assistant_turn(tiny_folder: Path, tmp_path: Path) -> None:
    """Against transformers alone: its template, its processor, its model, -100 where nobody speaks for the assistant."""
    from PIL import Image

    Image.new("RGB", (64, 32), "red").save(tmp_path / "a.png")
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "b.png")
    text = "text"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it? <|im_end|>"}]},
        {"role": "assistant", "content": "A red one."},
        {
            "role": "user",
            "content": [{"type": text, "text": "And"}, {"type": "image"}, {"type": text, "text": "this?"}],
        },
        {"role": "assistant", "content": "Blue."},
    ]
    line = {"messages": messages, "images": ["a.png", "b.png"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    settings = job(tiny_folder, f"sft.data={tmp_path / 'a.jsonl'}")
    policy = policy_of(settings)
    (trajectory,) = batch_of(settings, policy)
    spoken = [policy.text.codec.decode(trajectory.token_ids[turn.start : turn.stop]) for turn in trajectory.turns]
    assert spoken == ["A red one.", "Blue."]
    end = policy.text.codec.end_of_turn_id
    assert [trajectory.token_ids[turn.stop - 1] for turn in trajectory.turns] == [end, end]
    # The template's own text, but for the user's text that looks like a special token.
    chat = [{**m, "content": m["content"] if isinstance(m["content"], list) else [{"type": "text", "text": m["content"]}]}
            for m in messages]  # fmt: skip
    rendered = processor(tiny_folder).apply_chat_template(chat, tokenize=False)
    decoded = policy.text.codec._tokenizer.decode(trajectory.token_ids.tolist())
    while "<|image_pad|><|image_pad|>" in decoded:
        decoded = decoded.replace("<|image_pad|><|image_pad|>", "<|image_pad|>")
    assert decoded + "\n" == rendered
    model = plain_model(tiny_folder)
    model = PeftModel.from_pretrained(model, policy.payload(1).write(tmp_path / "adapter"))
    with torch.no_grad():
        logits = reference_logits(tiny_folder, model.base_model.model, trajectory.token_ids, trajectory.images)
    labels = torch.from_numpy(np.where(trajectory.loss_mask, trajectory.token_ids, -100).astype(np.int64))
    expected = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100)
    trainer = SFTTrainer(policy, settings)
    loss, targets = trainer.evaluate([[trajectory]])
    assert targets == int(trajectory.loss_mask.sum())
    assert loss == pytest.approx(float(expected), abs=1e-4)
    assert trainer.step([trajectory], 1e-3)[0] == pytest.approx(float(expected), abs=1e-4)


def test_conversations_with_one_beginning_share_it_and_the_loss_is_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    question = {"role": "user", "content": "Name a colour, any colour, please."}
    lines = [{"messages": [question, {"role": "assistant", "content": name}]} for name in ("red", "blue", "green")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for share in ("true", "false"):
        settings = job(tiny_folder, f"sft.data={tmp_path / 'a.jsonl'}", f"learner.share_prompts={share}")
        policy = policy_of(settings)
        trainer = SFTTrainer(policy, settings)
        batch = batch_of(settings, policy)
        rows = sum(len(micro.input_ids) for micro in trainer._builder.build([batch]))
        found.append((rows, trainer.step(batch, 1e-3)[0]))
    assert [rows for rows, _ in found] == [1, 3]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5)


def test_the_learning_rate_rises_and_falls(tiny_folder: Path) -> None:
    settings = job(
        tiny_folder, "learner.lr=1", "learner.lr_schedule=linear", "sft.warmup_steps=4", "learner.lr_final_fraction=0"
    )
    rates = [learning_rate(settings, step, 15) for step in range(15)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert np.diff(rates[4:]) == pytest.approx([-0.1] * 10)
    assert rates[-1] == 0


# --- answers


def test_the_last_turn_is_the_greedy_answer_where_transformers_writes_it(tiny_folder: Path) -> None:
    settings = job(tiny_folder)
    policy = policy_of(settings, scale=0.02)
    data = open_job_data(settings, policy.text)
    suppressed = policy.text.codec.suppressed_token_ids(policy.text.vocab_size).tolist()
    answered: list[Trajectory] = []
    for conversation in data.train.conversations(range(4)):
        (image,), question = conversation.messages[0].images, conversation.messages[0].text
        content = [{"type": "image", "image": image.to_pil()}, {"type": "text", "text": question}]
        inputs = processor(tiny_folder).apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True,
        )  # fmt: skip
        ids = policy.model.generate(**inputs, max_new_tokens=8, do_sample=False, suppress_tokens=suppressed)[0].numpy()
        start = inputs["input_ids"].shape[1]
        trajectory = data.encoder.encode(conversation)
        np.testing.assert_array_equal(trajectory.token_ids[: trajectory.turns[-1].start], ids[:start])
        other = ids.copy()
        other[-1] = policy.text.codec.encode_text("no")[0]
        for name, tokens in (("greedy", ids), ("other", other)):
            turns = (replace(trajectory.turns[-1], start=start, stop=len(tokens)),)
            answered.append(
                Trajectory(
                    f"{conversation.where} {name}", tokens.astype(np.int32), np.arange(len(tokens)) >= start,
                    np.zeros(len(tokens), np.float32), turns, trajectory.status, trajectory.images,
                )
            )  # fmt: skip
    assert SFTTrainer(policy, settings).writes(answered) == [True, False] * 4


# --- runs


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the shipped configuration, shortened."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    arguments = [str(CONFIG), f"model.path={tiny_folder}", "sft.steps=8", "sft.eval_every=4", "sft.eval_items=32"]
    arguments += ["sft.eval_answers=8", "logging.checkpoint_every=4", "--run-dir", str(folder)]
    code = "import sys; from rl_vlm.cli.app import run; code = run(sys.argv[1:]); print(code, 'ray' in sys.modules)"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, "sft", *arguments], capture_output=True, text=True, timeout=900, env=offline
    )
    assert done.stdout.splitlines()[-1] == "0 False", done.stdout + done.stderr  # fine-tuning imports no Ray
    return folder


@pytest.mark.slow
def test_the_run_folder_holds_what_it_should(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert (result["status"], result["iterations"], result["unit"]) == ("done", 8, "steps")
    assert result["eval_loss_after"] < result["eval_loss_before"] - 0.1
    assert 0 <= result["accuracy_before"] <= 1 and result["conversations"] == 500
    names = {path.name for path in finished.iterdir()}
    assert {"config.yaml", "progress.csv", "eval.jsonl", "checkpoints", "adapter", "curve.png", "result.json"} <= names
    assert run_files(finished) == files_in(finished)  # --overwrite would leave nothing behind
    entries = [json.loads(line) for line in (finished / "eval.jsonl").read_text().splitlines()]
    assert [entry["iteration"] for entry in entries] == [0, 4, 8]


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_bytes_of_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints" / "iteration-000008")
    shutil.rmtree(folder / "adapter")
    changed = "logging.checkpoint_every=8"  # it says so, and computes the same
    assert rl_vlm(["sft", str(folder), changed, "--resume", "--run-dir", str(folder)]) == 0
    for name in ("adapter/adapter_model.safetensors", "checkpoints/iteration-000008/optimizer.safetensors"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes()
    assert (folder / "checkpoints/iteration-000004/adapter/adapter_model.safetensors").read_bytes() != (
        folder / "adapter/adapter_model.safetensors"
    ).read_bytes()

    def losses(run: Path) -> list[str]:
        header, *lines = (run / "progress.csv").read_text().splitlines()
        return [line.split(",")[header.split(",").index("sft/loss")] for line in lines]

    assert losses(folder) == losses(finished) and len(losses(folder)) == 8
    assert rl_vlm(["sft", str(folder), "sft.steps=9", "--resume", "--run-dir", str(folder)]) == 0
    assert len(losses(folder)) == 9


@pytest.mark.slow
def test_a_resume_where_nothing_is_begins_anew(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"model.path={tiny_folder}",
        "sft.steps=1",
        "sft.eval_every=0",
        "--resume",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert rl_vlm(["sft", str(CONFIG), *words]) == 0
    said = capsys.readouterr()
    assert "begins anew" in said.out + said.err


@pytest.mark.slow
@pytest.mark.parametrize("change", ["sft.data=shapes@[:100]", "sft.batch_size=16", "seed=7"])
def test_a_resume_that_would_leave_rows_out_is_refused(
    change: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints" / "iteration-000008")
    assert rl_vlm(["sft", str(folder), change, "--resume", "--run-dir", str(folder)]) == 2
    assert "rows would be left out" in " ".join(capsys.readouterr().err.split())


# --- the adapter that training starts from


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "advice"),
    [
        ("{rank: 8}", "set model.lora='{rank: 16, alpha: 32, target_modules: all}'"),
        ("{alpha: 16}", "{rank: 16, alpha: 32, target_modules: all}, and model.lora says 16, 16 and all"),
        ("{target_modules: attn}", "target_modules: all}'"),
    ],
)
def test_an_adapter_that_is_not_the_configured_one_is_refused_before_anything_starts(
    lora: str, advice: str, finished: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(ROOT / "configs/quickstart.yaml"), f"model.path={tiny_folder}", f"model.adapter={finished}"]
    assert rl_vlm(["train", *arguments, "--dry-run"]) == 0
    assert f"adapter: {finished / 'adapter'}" in capsys.readouterr().out
    assert rl_vlm(["train", *arguments, f"model.lora={lora}", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert advice in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_picture_that_cannot_be_decoded_ends_the_run_with_a_checkpoint(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its header reads well, so it is found when it is needed."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:6000])
    lines = []
    for name in ("whole", "whole", "cut", "whole"):
        messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Noise."}]
        lines.append(json.dumps({"messages": messages, "images": [f"{name}.png"]}) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(lines))
    run = tmp_path / "run"
    changes = [f"model.path={tiny_folder}", f"sft.data={tmp_path / 'a.jsonl'}", "sft.batch_size=1"]
    assert rl_vlm(["sft", str(CONFIG), *changes, "--run-dir", str(run)]) == 2
    assert "a.jsonl, line 3: image 0 (cut.png) cannot be decoded" in capsys.readouterr().err
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    assert list((run / "checkpoints").iterdir())
