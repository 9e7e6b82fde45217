import json
from typing import Literal

import openai
import pydantic
from cells import AGENT_URL, KEY, MODEL, PICTURE, URL, cell

client = openai.OpenAI(base_url=URL, api_key=KEY)
ASK = [{"role": "user", "content": "How many shapes?"}]
SEE = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "How many?"},
            {"type": "image_url", "image_url": {"url": PICTURE, "detail": "high"}},
        ],
    }
]
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS, "strict": True},
}


class Red(pydantic.BaseModel):
    kind: Literal["red"]


class Blue(pydantic.BaseModel):
    kind: Literal["blue"]


class Seen(pydantic.BaseModel):
    colour: Red | Blue = pydantic.Field(discriminator="kind")


class Answer(pydantic.BaseModel):
    yes: bool
    size: int = pydantic.Field(ge=0, le=9)


@cell("models")
def _():
    assert MODEL in [model.id for model in client.models.list()] and client.models.retrieve(MODEL).id == MODEL


@cell("chat, image, n, logprobs")
def _():
    told = client.chat.completions.create(
        model=MODEL, messages=SEE, n=2, logprobs=True, top_logprobs=3, max_tokens=20, seed=1, stop=["\n\n"], user="me"
    )
    assert len(told.choices) == 2 and told.choices[0].logprobs.content[0].top_logprobs and told.usage.total_tokens


@cell("chat stream, usage")
def _():
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SEE, stream=True, stream_options={"include_usage": True}, max_completion_tokens=20
        )
    )
    assert chunks[-1].usage.completion_tokens and any(chunk.choices[0].delta.content for chunk in chunks[:-1])


@cell("chat stream helper")
def _():
    with client.chat.completions.stream(model=MODEL, messages=ASK, max_tokens=20) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content and "content.delta" in kinds


@cell("chat parse")
def _():
    told = client.chat.completions.parse(model=MODEL, messages=SEE, response_format=Answer, max_tokens=300)
    assert isinstance(told.choices[0].message.parsed, Answer)


@cell("chat parse, tagged union")
def _():
    told = client.chat.completions.parse(model=MODEL, messages=SEE, response_format=Seen, max_tokens=500)
    assert told.choices[0].message.parsed.colour.kind in ("red", "blue")


@cell("chat stream parse")
def _():
    with client.chat.completions.stream(model=MODEL, messages=ASK, response_format=Answer, max_tokens=300) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)


@cell("json_object")
def _():
    told = client.chat.completions.create(
        model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=1000, temperature=0
    )
    assert told.choices[0].finish_reason == "length" or isinstance(json.loads(told.choices[0].message.content), dict)


@cell("tools required, named")
def _():
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        told = client.chat.completions.create(
            model=MODEL, messages=SEE, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=300
        )
        (call,) = told.choices[0].message.tool_calls
        assert 0 <= json.loads(call.function.arguments)["x"] <= 9


@cell("tools parse")
def _():
    told = client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(Answer)], tool_choice="required",
        parallel_tool_calls=False, max_tokens=300,
    )  # fmt: skip
    assert isinstance(told.choices[0].message.tool_calls[0].function.parsed_arguments, Answer)


@cell("completions, echo, logprobs")
def _():
    (choice,) = client.completions.create(model=MODEL, prompt="One, two", echo=True, logprobs=1, max_tokens=2).choices
    assert choice.text.startswith("One, two") and choice.logprobs.token_logprobs[0] is None


@cell("completions stream, list, n")
def _():
    chunks = list(client.completions.create(model=MODEL, prompt=["a", "b"], n=2, stream=True, max_tokens=4))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2, 3}


@cell("responses")
def _():
    seen = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "?"},
                {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
            ],
        }
    ]
    told = client.responses.create(model=MODEL, input=seen, instructions="Count.", max_output_tokens=30, store=False)
    assert told.output_text and told.usage.output_tokens


@cell("responses stream")
def _():
    with client.responses.stream(model=MODEL, input="How many?", max_output_tokens=30) as stream:
        list(stream)
        assert stream.get_final_response().output


@cell("responses parse, stream parse")
def _():
    told = client.responses.parse(model=MODEL, input="How many?", text_format=Answer, max_output_tokens=300)
    assert isinstance(told.output_parsed, Answer)
    with client.responses.stream(model=MODEL, input="?", text_format=Answer, max_output_tokens=300) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


@cell("responses tools")
def _():
    tool = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": True}
    told = client.responses.create(
        model=MODEL, input="?", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=300
    )
    (call,) = [item for item in told.output if item.type == "function_call"]
    assert json.loads(call.arguments)["x"] <= 9
    again = [
        {"role": "user", "content": "?"},
        *told.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
    ]
    assert client.responses.create(model=MODEL, input=again, tools=[tool], max_output_tokens=30).output


@cell("agent loop with tools")
def _():
    agent = openai.OpenAI(base_url=AGENT_URL, api_key=KEY)
    turns = list(ASK)
    for _ in range(2):
        message = agent.chat.completions.create(model="tiny", messages=turns, tools=[TOOL]).choices[0].message
        turns.append(message)
        for call in message.tool_calls or ():
            turns.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    assert message.content == "Two."


@cell("errors")
def _():
    try:
        client.chat.completions.create(model="nobody", messages=ASK)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    try:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=3)
    except openai.BadRequestError as error:
        assert error.param == "temperature"
