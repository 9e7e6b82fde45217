import json
import subprocess
import sys
from pathlib import Path

from cells import KEY, MODEL, URL, cell, png

Path("tasks").mkdir(exist_ok=True)
Path("picture.png").write_bytes(png())
Path("seen.jsonl").write_text(
    "".join(json.dumps({"question": f"How many? {k}", "answer": str(k)}) + "\n" for k in range(4))
)
Path("tasks/seen.yaml").write_text("""
task: seen
dataset_path: json
dataset_kwargs: {data_files: {test: seen.jsonl}}
test_split: test
output_type: generate_until
doc_to_visual: !function of_seen.visual
doc_to_text: !function of_seen.text
doc_to_messages: !function of_seen.messages
doc_to_target: answer
generation_kwargs: {max_new_tokens: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""")
Path("tasks/of_seen.py").write_text("""
from PIL import Image

def visual(doc):
    return [Image.open("picture.png")] * 2

def text(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]

def messages(doc, lmms_eval_specific_kwargs=None):
    pictures = [{"type": "image", "url": one} for one in visual(doc)]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": doc["question"]}]}]
""")


for model in ("openai", "async_openai"):

    @cell(f"{model}: a task with two pictures", tries=1)
    def _():
        done = subprocess.run(
            [
                sys.executable, "-m", "lmms_eval", "eval", "--model", model, "--tasks", "seen", "--include_path",
                "tasks", "--model_args", f"model_version={MODEL},base_url={URL},api_key={KEY}", "--log_samples",
                "--batch_size", "2", "--output_path", model,
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        sys.stderr.write(done.stderr[-9000:])
        (samples,) = sorted(Path(model).rglob("*samples_seen.jsonl"))[-1:]
        assert done.returncode == 0 and "REQUEST_FAILED" not in samples.read_text() and "|seen" in done.stdout
