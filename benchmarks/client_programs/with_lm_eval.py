import json
import subprocess
import sys
from pathlib import Path

from cells import MODEL, URL, cell

Path("items.jsonl").write_text(
    "".join(json.dumps({"q": f"{k} and {k} is", "choices": [str(2 * k), str(k)], "gold": 0}) + "\n" for k in range(4))
)
SHARED = (
    "dataset_path: json\ndataset_kwargs: {data_files: {test: items.jsonl}}\ntest_split: test\ndoc_to_text: '{{q}}'\n"
)
Path("tasks").mkdir(exist_ok=True)
Path("tasks/choose.yaml").write_text(
    f"task: choose\n{SHARED}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\ndoc_to_target: gold\n"
)
Path("tasks/write.yaml").write_text(
    f"task: write\n{SHARED}output_type: generate_until\ndoc_to_target: '{{{{choices[0]}}}}'\n"
    "generation_kwargs: {until: ['\\n\\n'], max_gen_toks: 20}\nmetric_list: [{metric: exact_match}]\n"
)
# The server's tokeniser is asked, or texts are sent.
WAYS = {
    "local-completions, remote tokenizer": ("local-completions", "completions", "tokenizer_backend=remote"),
    "local-completions, texts": ("local-completions", "completions", "tokenizer_backend=None,tokenized_requests=False"),
    "local-chat-completions": (
        "local-chat-completions",
        "chat/completions",
        "tokenizer_backend=None,tokenized_requests=False",
    ),
}
for name, (kind, path, more) in WAYS.items():
    for task in ("choose", "write"):
        if task == "choose" and "remote" not in more:
            continue  # lm-eval scores answers by tokens, and no answer of a chat

        @cell(f"{name}: {task}", tries=1)
        def _():
            done = subprocess.run(
                [
                    str(Path(sys.executable).with_name("lm_eval")), "--model", kind, "--tasks", task,
                    "--include_path", "tasks", "--model_args", f"model={MODEL},base_url={URL}/{path},{more}",
                    *(["--apply_chat_template"] if "chat" in kind else []),
                ],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            sys.stderr.write(done.stderr[-5000:])
            assert done.returncode == 0 and f"|{task}" in done.stdout, done.stderr[-500:]
