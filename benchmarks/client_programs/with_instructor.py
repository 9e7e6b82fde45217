import instructor
import openai
import pydantic
from cells import AGENT_URL, KEY, MODEL, PICTURE, URL, cell


class Answer(pydantic.BaseModel):
    """What is seen."""

    yes: bool
    size: int = pydantic.Field(ge=0, le=9)


SEE = [{"role": "user", "content": ["How many?", instructor.Image.from_base64(PICTURE)]}]
# A schema that is only part of the prompt needs a model that heeds it.
FORMS = {"TOOLS": URL, "TOOLS_STRICT": URL, "JSON_SCHEMA": URL, "JSON": AGENT_URL, "MD_JSON": AGENT_URL}
for name, url in FORMS.items():
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key=KEY), mode=instructor.Mode[name])

    @cell(name)
    def _():
        told = client.chat.completions.create(
            model=MODEL if url == URL else "tiny", messages=SEE, response_model=Answer, max_retries=0, max_tokens=500
        )
        assert isinstance(told, Answer)


@cell("RESPONSES_TOOLS")
def _():
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.RESPONSES_TOOLS)
    assert isinstance(client.responses.create(model=MODEL, input="How many?", response_model=Answer), Answer)


@cell("from_provider, partial")
def _():
    client = instructor.from_provider(f"openai/{MODEL}", base_url=URL, api_key=KEY)
    *_, last = client.create_partial(messages=SEE, response_model=Answer, max_tokens=500)
    assert last.size is not None
