"""`--first-chat`: sends one chat to the started deployment and prints what to try next."""

import aiohttp
import msgspec

from penstock.deploy.state import admin_token_path

QUESTION = "What is Penstock?"
_TIMEOUT_S = 120.0


async def chat_once(url: str, model: str, api_key: str | None = None) -> None:
    """Send one question, print the answer as it streams, then the next steps.

    A failure is printed, not raised: the deployment keeps running.
    """
    print(f"\nyou> {QUESTION}\n{model}> ", end="", flush=True)  # noqa: T201 - command output
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "max_tokens": 200,
    }
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            async for line in response.content:
                print(_text_of(line), end="", flush=True)  # noqa: T201
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"(no answer: {error or type(error).__name__})", end="")  # noqa: T201
    print(f"\n{what_next(url, model, asks_key=api_key is not None)}", flush=True)  # noqa: T201


def _text_of(line: bytes) -> str:
    """Give the text in one line of the answer: a stream event, or an error's JSON."""
    data = line.removeprefix(b"data: ").strip()
    if not data.startswith(b"{"):
        return ""
    event = msgspec.json.decode(data)
    if "error" in event:
        return f"(no answer: {event['error']['message']})"
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def what_next(url: str, model: str, *, asks_key: bool = False) -> str:
    """Format commands to try next; with `asks_key` they have a placeholder KEY for the API key."""
    key = " -H 'Authorization: Bearer KEY'" if asks_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What does the router do?"}}]}}'
    return f"""
Try next, in another terminal:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'

  from openai import OpenAI          # pip install openai
  client = OpenAI(base_url="{url}/v1", api_key="{"KEY" if asks_key else "none"}")
  question = [{{"role": "user", "content": "What is a KV cache?"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=question, stream=True):
      print(chunk.choices[0].delta.content or "", end="")

  curl -H "Authorization: Bearer $(cat {admin_token_path()})" {url}/admin/workers   # who serves, and with what load
  curl {url}/metrics                 # Prometheus
"""
