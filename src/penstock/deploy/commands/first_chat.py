"""`--first-chat`: sends one chat to the started deployment."""

from collections.abc import Callable

import aiohttp
import msgspec

QUESTION = "What is Penstock?"
_TIMEOUT_S = 120.0


async def chat_once(
    url: str, model: str, api_key: str | None = None, *, write: Callable[[str], None]
) -> None:
    """Send one question, and `write` the answer as it streams.

    A failure is written, not raised: the deployment keeps running.
    """
    write(f"\nyou> {QUESTION}\n{model}> ")
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
                write(_text_of(line))
    except (aiohttp.ClientError, TimeoutError) as error:
        write(f"(no answer: {error or type(error).__name__})")
    write("\n")


def _text_of(line: bytes) -> str:
    """Give the text in one line of the answer: a stream event, or an error's JSON."""
    data = line.removeprefix(b"data: ").strip()
    if not data.startswith(b"{"):
        return ""
    event = msgspec.json.decode(data)
    if "error" in event:
        return f"(no answer: {event['error']['message']})"
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
