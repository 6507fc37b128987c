"""Instructor: objects of a pydantic class, by a required tool call, by JSON mode and by a JSON schema, also while they come."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Fact(BaseModel):
    city: str
    days: int


def made(mode: instructor.Mode) -> dict:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_retries": 0}
    whole = client.chat.completions.create(response_model=Fact, **ask)
    *_, last = client.chat.completions.create_partial(response_model=Fact, **ask)
    return {"whole": whole.model_dump(), "streamed": last.model_dump()}


MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA)
print(json.dumps({mode.value: made(mode) for mode in MODES}))
