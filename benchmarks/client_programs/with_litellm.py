import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import litellm
import openai
import pydantic
from cells import AGENT_URL, KEY, MODEL, PICTURE, URL, cell

SEE = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "How many?"}, {"type": "image_url", "image_url": {"url": PICTURE}}],
    }
]
LOOK = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": LOOK}}]


class Answer(pydantic.BaseModel):
    yes: bool


for provider in ("openai", "hosted_vllm"):
    there = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": KEY}

    @cell(f"{provider}: completion, stream")
    def _():
        told = litellm.completion(**there, messages=SEE, n=2, max_tokens=30, drop_params=False)
        assert told.choices[1].message.content and told.usage.total_tokens
        assert list(litellm.completion(**there, messages=SEE, stream=True, max_tokens=30))

    @cell(f"{provider}: response_format, tools")
    def _():
        told = litellm.completion(**there, messages=SEE, response_format=Answer, max_tokens=500)
        Answer.model_validate_json(told.choices[0].message.content)
        told = litellm.completion(**there, messages=SEE, tools=TOOLS, tool_choice="required", max_tokens=500)
        assert told.choices[0].message.tool_calls[0].function.name == "look"
        chunks = list(
            litellm.completion(
                model=f"{provider}/tiny", api_base=AGENT_URL, api_key=KEY, messages=SEE, tools=TOOLS, stream=True
            )
        )
        assert litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function.name == "look"


@cell("responses")
def _():
    assert litellm.responses(
        model=f"openai/{MODEL}", api_base=URL, api_key=KEY, input="How many?", max_output_tokens=20
    ).output


for provider in ("text-completion-openai", "hosted_vllm"):

    @cell(f"{provider}: text_completion")
    def _():
        told = litellm.text_completion(
            model=f"{provider}/{MODEL}", api_base=URL, api_key=KEY, prompt="One, two", max_tokens=10, logprobs=1
        )
        assert told.choices[0].text is not None


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
Path("proxy.yaml").write_text(
    json.dumps(
        {
            "model_list": [
                {
                    "model_name": "m",
                    "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": KEY},
                },
                {
                    "model_name": "a",
                    "litellm_params": {"model": "hosted_vllm/tiny", "api_base": AGENT_URL, "api_key": KEY},
                },
                {
                    "model_name": "t",
                    "litellm_params": {"model": f"text-completion-openai/{MODEL}", "api_base": URL, "api_key": KEY},
                },
            ]
        }
    )
)
os.environ["LITELLM_MASTER_KEY"] = "sk-" + secrets.token_hex(24)
with Path("proxy.log").open("w") as log:
    proxy = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("litellm")),
            "--config",
            "proxy.yaml",
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ],
        stdout=log,
        stderr=log,
    )
try:
    for _ in range(120):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health/liveliness").raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(1)
    through = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=os.environ["LITELLM_MASTER_KEY"])

    @cell("proxy: chat, stream, tools")
    def _():
        assert through.chat.completions.create(model="m", messages=SEE, max_tokens=20).choices[0].message.content
        assert list(through.chat.completions.create(model="m", messages=SEE, max_tokens=20, stream=True))
        assert through.chat.completions.create(model="a", messages=SEE, tools=TOOLS).choices[0].message.tool_calls

    @cell("proxy: parse")
    def _():
        told = through.chat.completions.parse(model="m", messages=SEE, response_format=Answer, max_tokens=500)
        assert isinstance(told.choices[0].message.parsed, Answer)

    @cell("proxy: text completion")
    def _():
        assert through.completions.create(model="t", prompt="One, two", max_tokens=10).choices

    @cell("proxy: responses")
    def _():
        assert through.responses.create(model="m", input="How many?", max_output_tokens=20).output
        assert list(through.responses.create(model="m", input="How many?", max_output_tokens=20, stream=True))
finally:
    proxy.terminate()
    proxy.wait()
