"""Asks a frontend as a link of regions does: `python -m benchmarks.regions.asker URL AUTHORITY COUNT TOKENS...`.

It prints JSON: by length of the prompt, and by whether connections are kept, the TTFT of each request in seconds. `AUTHORITY` is
the certificate that signs the server's, empty for http.
"""

import asyncio
import json
import ssl
import sys
from time import perf_counter

from penstock.demo import MODEL_NAME
from penstock.engine.openai.connection import Connection
from penstock.engine.openai.region.config import RegionLimits

_WARMUP = 3
_PAUSE_S = 0.3


async def _ttft_s(connection: Connection, tokens: int) -> float:
    body = {"model": MODEL_NAME, "prompt": [5] * tokens, "max_tokens": 2, "ignore_eos": True, "stream": True}
    begun_s = perf_counter()
    async with connection.stream("/v1/completions", body, lambda: None) as lines:
        await anext(lines)
        first_s = perf_counter() - begun_s
        async for _ in lines:
            pass
    return first_s


async def main(url: str, authority: str, count: str, *lengths: str) -> None:
    tls = ssl.create_default_context(cafile=authority) if authority else None
    ways = {
        name: Connection(url, RegionLimits(), tls=tls, keeps=keeps)
        for name, keeps in (("kept", True), ("fresh", False))
    }
    taken: dict[str, list[float]] = {f"{tokens}_{way}": [] for tokens in lengths for way in ways}
    for number in range(_WARMUP + int(count)):
        for tokens in lengths:
            for way, connection in ways.items():
                await asyncio.sleep(_PAUSE_S)  # longer than TCP keeps what it learned of the way
                first_s = await _ttft_s(connection, int(tokens))
                if number >= _WARMUP:
                    taken[f"{tokens}_{way}"].append(round(first_s, 5))
    for connection in ways.values():
        await connection.close()
    print(json.dumps(taken))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
