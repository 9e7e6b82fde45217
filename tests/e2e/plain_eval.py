"""Greedy accuracy of an adapter on held-out shapes with plain transformers and peft: nothing of this package's engine.

    python tests/e2e/plain_eval.py MODEL_FOLDER ADAPTER_FOLDER [ITEMS]

Only the environment is ours: it draws the pictures and grades the answers.
"""

from __future__ import annotations

import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

import rl_vlm


def main() -> None:
    """Print {"accuracy": ...}."""
    folder, adapter = sys.argv[1:3]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 512
    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(folder, padding_side="left")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).eval()
    special = [
        i for i in processor.tokenizer.all_special_ids if i != processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ]
    right = 0
    for start in range(0, count, 64):
        envs, texts, images = [], [], []
        for index in range(start, min(start + 64, count)):
            env = rl_vlm.make("Shapes-v0", task="count")
            observation, _ = env.reset(seed=0, options={"index": index, "split": "test"})
            content = []
            for part in observation.messages[0].parts:
                content.append({"type": "text", "text": part} if isinstance(part, str) else {"type": "image"})
                if not isinstance(part, str):
                    images.append([part.to_pil() if hasattr(part, "to_pil") else part])
            envs.append(env)
            messages = [{"role": observation.messages[0].role, "content": content}]
            texts.append(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**batch, do_sample=False, max_new_tokens=16, suppress_tokens=special)
        for env, ids in zip(envs, out[:, batch["input_ids"].shape[1] :], strict=True):
            text = processor.tokenizer.decode(ids, skip_special_tokens=False)
            if "<|im_end|>" in text:
                right += env.step(text.split("<|im_end|>")[0])[1] == 1.0
    print(json.dumps({"accuracy": right / count}))


if __name__ == "__main__":
    main()
