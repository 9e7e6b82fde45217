import os

from cells import AGENT_URL, KEY, MODEL, PICTURE, URL, cell
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

os.environ["INSPECT_DISPLAY"] = "none"
model = {
    kind: get_model(f"openai-api/served/{MODEL}", base_url=URL, api_key=KEY, responses_api=kind)
    for kind in (False, True)
}
talk = {
    kind: get_model("openai-api/served/tiny", base_url=AGENT_URL, api_key=KEY, responses_api=kind)
    for kind in (False, True)
}
SEE = [ChatMessageUser(content=[ContentText(text="How many?"), ContentImage(image=PICTURE)])]


class Answer(BaseModel):
    yes: bool


@tool
def look() -> Tool:
    async def execute(x: int) -> list:
        """Look closer.

        Args:
            x: where.
        """
        return [ContentText(text="seen"), ContentImage(image=PICTURE)]

    return execute


def run(task, of):
    (log,) = eval(task, model=of, display="none", log_dir="logs", retry_on_error=0)
    assert log.status == "success", log.error
    return log


for kind in (False, True):
    name = "responses_api" if kind else "chat"

    @cell(f"{name}: task with a picture")
    def _():
        task = Task(
            [Sample(SEE, target="2", id=k) for k in range(2)],
            scorer=includes(),
            config=GenerateConfig(max_tokens=50, seed=1),
        )
        assert run(task, model[kind]).samples[0].output.completion

    @cell(f"{name}: response_schema")
    def _():
        form = ResponseSchema(name="answer", json_schema=json_schema(Answer))
        log = run(Task([Sample(SEE)], config=GenerateConfig(max_tokens=300, response_schema=form)), model[kind])
        Answer.model_validate_json(log.samples[0].output.completion)

    @cell(f"{name}: use_tools, a tool returns a picture")
    def _():
        log = run(
            Task([Sample(SEE, target="Two")], solver=[use_tools(look()), generate()], scorer=includes()), talk[kind]
        )
        assert log.samples[0].output.completion == "Two." and log.results.scores[0].metrics["accuracy"].value == 1


@cell("provider vllm, top_k")
def _():
    of = get_model(f"vllm/{MODEL}", base_url=URL, api_key=KEY)
    assert run(Task([Sample(SEE)], config=GenerateConfig(max_tokens=20, top_k=5)), of).samples[0].output.choices


@cell("logprobs, num_choices, stop")
def _():
    settings = GenerateConfig(logprobs=True, top_logprobs=2, num_choices=2, stop_seqs=["x"], max_tokens=20)
    log = run(Task([Sample(SEE)], config=settings), model[False])
    assert len(log.samples[0].output.choices) == 2 and log.samples[0].output.choices[0].logprobs.content
