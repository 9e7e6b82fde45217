import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.tool import ToolOutputImage
from cells import AGENT_URL, KEY, MODEL, PICTURE, URL, cell
from openai import AsyncOpenAI

set_tracing_disabled(True)


class Answer(pydantic.BaseModel):
    yes: bool
    size: int = pydantic.Field(ge=0, le=9)


@function_tool
def look(x: int) -> str:
    """Look closer."""
    return "seen"


@function_tool(name_override="look")
def look_at(x: int) -> ToolOutputImage:
    """Look closer."""
    return ToolOutputImage(image_url=PICTURE)


SEE = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "How many?"},
            {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        ],
    }
]
short = ModelSettings(max_tokens=500)
for kind, of in {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}.items():

    def model(url=URL, name=MODEL, of=of):
        return of(model=name, openai_client=AsyncOpenAI(base_url=url, api_key=KEY))

    def talk():
        return model(AGENT_URL, "tiny")

    @cell(f"{kind}: run, stream")
    async def _():
        agent = Agent("a", instructions="Count.", model=model(), model_settings=short)
        assert (await Runner.run(agent, SEE)).final_output
        told = Runner.run_streamed(agent, SEE)
        assert [event async for event in told.stream_events()] and told.final_output

    @cell(f"{kind}: output_type")
    async def _():
        agent = Agent("a", model=model(), output_type=Answer, model_settings=short)
        assert isinstance((await Runner.run(agent, SEE)).final_output, Answer)

    @cell(f"{kind}: tools")
    async def _():
        agent = Agent("a", model=talk(), tools=[look])
        assert (await Runner.run(agent, SEE)).final_output == "Two."
        told = Runner.run_streamed(agent, SEE)
        assert [event async for event in told.stream_events()] and told.final_output == "Two."

    @cell(f"{kind}: a call is required, then an output_type")
    async def _():
        needed = ModelSettings(tool_choice="required", parallel_tool_calls=False)
        agent = Agent("a", model=talk(), tools=[look], output_type=Answer, model_settings=needed)
        assert isinstance((await Runner.run(agent, SEE)).final_output, Answer)

    @cell(f"{kind}: tools, then an output_type")
    async def _():
        told = await Runner.run(Agent("a", model=talk(), tools=[look], output_type=Answer), SEE)
        assert isinstance(told.final_output, Answer) and len(told.new_items) == 3

    @cell(f"{kind}: handoff offered")
    async def _():
        agent = Agent("a", model=talk(), tools=[look], handoffs=[Agent("b", model=talk())])
        assert (await Runner.run(agent, SEE)).final_output == "Two."


@cell("responses: a tool returns a picture")
async def _():
    agent = Agent("a", model=talk(), tools=[look_at])
    assert (await Runner.run(agent, SEE)).final_output == "Two."
