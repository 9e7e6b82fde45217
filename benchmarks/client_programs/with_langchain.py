import pydantic
from cells import AGENT_URL, KEY, MODEL, PICTURE, URL, cell
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


class Answer(pydantic.BaseModel):
    """What is seen."""

    yes: bool
    size: int = pydantic.Field(ge=0, le=9)


@tool
def look(x: int) -> list:
    """Look closer."""
    return [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": PICTURE}}]


SEE = [HumanMessage([{"type": "text", "text": "How many?"}, {"type": "image_url", "image_url": {"url": PICTURE}}])]
model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=500)
agent = ChatOpenAI(model="tiny", base_url=AGENT_URL, api_key=KEY)


@cell("invoke, batch, logprobs")
def _():
    assert model.invoke(SEE).usage_metadata["total_tokens"]
    assert len(model.batch(["a", "b"])) == 2
    assert model.bind(logprobs=True, top_logprobs=2).invoke("?").response_metadata["logprobs"]["content"]


@cell("stream, astream_events")
async def _():
    assert "".join(chunk.text for chunk in model.stream(SEE))
    assert [event async for event in model.astream_events("?")]


for method in ("json_schema", "function_calling", "json_mode"):

    @cell(f"with_structured_output {method}")
    def _():
        chosen = agent if method == "json_mode" else model  # there the schema is the prompt's
        asked = [*SEE, HumanMessage('Answer as {"yes": bool, "size": int}.')]
        told = chosen.with_structured_output(Answer, method=method, include_raw=True).invoke(asked)
        assert isinstance(told["parsed"], Answer), told


@cell("with_structured_output strict function_calling")
def _():
    assert isinstance(model.with_structured_output(Answer, method="function_calling", strict=True).invoke(SEE), Answer)


@cell("bind_tools any, by name")
def _():
    for choice in ("any", "look"):
        assert model.bind_tools([look], tool_choice=choice).invoke(SEE).tool_calls[0]["name"] == "look"


@cell("agent, a tool returns a picture")
def _():
    assert create_agent(agent, [look]).invoke({"messages": SEE})["messages"][-1].text == "Two."


@cell("agent streamed")
def _():
    *_, last = create_agent(agent, [look]).stream({"messages": SEE}, stream_mode="values")
    assert last["messages"][-1].text == "Two."


@cell("agent structured: provider, tool")
def _():
    asked = {"messages": SEE}
    assert isinstance(
        create_agent(model, [], response_format=ProviderStrategy(Answer)).invoke(asked)["structured_response"], Answer
    )
    assert isinstance(
        create_agent(model, [], response_format=ToolStrategy(Answer)).invoke(asked)["structured_response"], Answer
    )


@cell("agent, tools, then a provider's form")
def _():
    told = create_agent(agent, [look], response_format=ProviderStrategy(Answer)).invoke({"messages": SEE})
    assert isinstance(told["structured_response"], Answer) and len(told["messages"]) == 4


@cell("responses API")
def _():
    responses = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, use_responses_api=True, max_tokens=500)
    assert responses.invoke(SEE).usage_metadata["total_tokens"]
    assert isinstance(responses.with_structured_output(Answer).invoke(SEE), Answer)
    talk = ChatOpenAI(model="tiny", base_url=AGENT_URL, api_key=KEY, use_responses_api=True)
    assert create_agent(talk, [look]).invoke({"messages": SEE})["messages"][-1].text == "Two."


@cell("text completion (OpenAI)")
def _():
    assert isinstance(OpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=20).invoke("One, two"), str)
