"""LangChain's ChatOpenAI and OpenAI: invoke, stream, batch, tools with history, structured output, the Responses API."""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
API = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}


class Fact(BaseModel):
    city: str
    days: int


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


chat = ChatOpenAI(**API)
armed = chat.bind_tools([weather])
messages = [SystemMessage("be brief"), HumanMessage("hello")]
called = armed.invoke(messages)
results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
chunks = list(chat.stream("hello", stream_usage=True))
parts = [chunk for chunk in armed.stream(messages) if chunk.tool_call_chunks]
print(
    json.dumps(
        {
            "text": chat.invoke("hello").content,
            "streamed": "".join(chunk.content for chunk in chunks),
            "tokens": max(
                (chunk.usage_metadata or {"output_tokens": 0})["output_tokens"] for chunk in chunks
            ),
            "embedding": OpenAIEmbeddings(**API, check_embedding_ctx_length=False).embed_documents(
                ["hello", "hi"]
            )[1],
            "batch": [answer.content for answer in chat.batch(["hello", "hi"])],
            "call": called.tool_calls[0]["args"],
            "streamed_call": json.loads("".join(part.tool_call_chunks[0]["args"] or "" for part in parts)),
            "after": armed.invoke([*messages, called, *results]).content,
            "format": chat.with_structured_output(Fact, method="json_schema").invoke("hello").model_dump(),
            "function": chat.with_structured_output(Fact, method="function_calling")
            .invoke("hello")
            .model_dump(),
            "responses": ChatOpenAI(use_responses_api=True, **API).invoke("hello").content[0]["text"],
            "completion": OpenAI(**API, max_tokens=50).invoke("hello"),
            "logprobs": len(
                chat.bind(logprobs=True, top_logprobs=2)
                .invoke("hello")
                .response_metadata["logprobs"]["content"]
            ),
        }
    )
)
