"""LiteLLM, as a library: chats, streams, tools, formats, and this server by several of its providers."""

import json
import sys

import litellm

URL, MODEL = sys.argv[1:]
API = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
HI = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def chat(provider: str = "openai", **fields):
    return litellm.completion(model=f"{provider}/{MODEL}", messages=HI, **(API | fields))


def streamed() -> dict:
    text, usage = "", None
    for chunk in chat(stream=True, stream_options={"include_usage": True}):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = getattr(chunk, "usage", None) or usage
    return {"text": text, "tokens": usage.completion_tokens}


def history() -> str:
    asked = chat(tools=TOOLS).choices[0].message
    call = asked.tool_calls[0]
    messages = [*HI, asked.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    return (
        litellm.completion(model=f"openai/{MODEL}", messages=messages, tools=TOOLS, **API)
        .choices[0]
        .message.content
    )


print(
    json.dumps(
        {
            "text": chat().choices[0].message.content,
            "streamed": streamed(),
            "hosted_vllm": chat("hosted_vllm").choices[0].message.content,
            "anthropic": chat("anthropic", api_base=URL, max_tokens=50).choices[0].message.content,
            "responses": litellm.responses(model=f"openai/{MODEL}", input="hello", **API)
            .output[0]
            .content[0]
            .text,
            "completion": litellm.text_completion(
                model=f"text-completion-openai/{MODEL}", prompt="hello", max_tokens=50, **API
            )
            .choices[0]
            .text,
            "call": json.loads(chat(tools=TOOLS).choices[0].message.tool_calls[0].function.arguments),
            "after": history(),
            "embedding": litellm.embedding(model=f"openai/{MODEL}", input=["hello", "hi"], **API).data[1][
                "embedding"
            ],
            "format": json.loads(
                chat(
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "fact", "schema": {"type": "object"}, "strict": True},
                    }
                )
                .choices[0]
                .message.content
            ),
        }
    )
)
