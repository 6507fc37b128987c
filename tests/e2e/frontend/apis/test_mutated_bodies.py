"""Thousands of damaged bodies to every route that takes one: each is answered or refused, none breaks the server."""

import asyncio
import contextlib
import copy
import io
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from frontend_site import Site, serving

from tests.support.tool_talk import SAID, agent, says

DATA = Path(__file__).parents[3] / "data"
BIG_BYTES = 10 << 20
SEEDS: list[tuple[str, dict[str, Any]]] = json.loads((DATA / "sound_bodies.json").read_text())
"""Sound bodies with their paths; the first of each path has most of its fields."""
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3.5, 4.0, 1e308, -1e-300, 1 << 31, 1 << 63, -(1 << 64), "", "x", "auto", "none", "\x00", "\ud7ff",
    "é" * 50, "a" * 70_000, [], {}, [[]], [None], {"": None}, {"type": "text"}, {"type": "function"}, ["a", 1], {"a": {"b": [1]}}, [5] * 300,
    1.0, 1e15, 1 << 53, [1.0], [True], [-1], [1 << 62], {"-1": 1}, {"5": None}, {"5": 1e300}, [""], ["a"] * 1000, "\u202e", "{{ 7 * 7 }}",
    "(a+)+$", "[a-z]{1,100000}", 'root ::= root "a"', {"$ref": "#"}, {"$defs": 5}, {"$defs": [1]}, {"type": []}, {"enum": list(range(2000))},
    {"properties": {"a": {"$ref": 5}}}, "data:image/png;base64,", "http://169.254.169.254/",
]  # fmt: skip


def places(node: Any) -> list[tuple[Any, Any]]:
    """Give (container, key) of everything in a body."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    found = [(node, key) for key in keys]
    return found + [place for key in keys for place in places(node[key])]


def mutated(rng: random.Random, seed: dict[str, Any]) -> bytes:
    body = copy.deepcopy(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(body)
        if not found:
            break
        container, key = rng.choice(found)
        match rng.randrange(5):
            case 0 | 1 | 2:
                container[key] = copy.deepcopy(rng.choice(VALUES))
            case 3 if isinstance(container, dict):
                container[rng.choice(("model", "content", "type", "extra", key + "x", ""))] = container.pop(
                    key
                )
            case _:
                del container[key]
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    match rng.randrange(12):
        case 0:
            cut = rng.randrange(len(raw) + 1)
            raw = raw[:cut] + rng.randbytes(rng.randrange(4)) + raw[cut + rng.randrange(4) :]
        case 1:
            raw = raw[: rng.randrange(len(raw) + 1)]
        case 2:
            raw = raw.decode("utf-8", "surrogatepass").encode(
                rng.choice(("utf-16", "utf-32", "utf-8-sig")), "replace"
            )
        case 3:
            depth = rng.choice((50, 300, 700, 900, 960, 980, 2000))
            raw = raw[:-1] + b',"deep":' + b"[" * depth + b"]" * depth + b"}"
    return raw


@contextlib.asynccontextmanager
async def tried(folder: Path, **config: Any) -> AsyncIterator[tuple[Site, aiohttp.ClientSession]]:
    """Serve every route, with a file for batches."""
    talker, embedder = says(SAID, at_once=40), agent().script
    talker.script = lambda request, said=talker.script: (embedder if request.embeds else said)(request)
    async with (
        serving(dispatcher=talker, batches={"directory": str(folder)}, **config) as site,
        aiohttp.ClientSession(f"http://127.0.0.1:{site.port}") as http,
    ):
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b'{"custom_id": "1"}', filename="in.jsonl")
        async with http.post("/v1/files", data=form) as answer:
            dict(SEEDS)["/v1/batches"]["input_file_id"] = (await answer.json())["id"]
        for path, seed in SEEDS:
            async with http.post(path, json=seed) as answer:
                assert answer.status == 200, (path, seed, await answer.text())
        yield site, http


async def status_of(http: aiohttp.ClientSession, path: str, raw: bytes) -> int:
    """Send a body; check that its answer is no failure of the server's and, if a refusal, one that says what is wrong."""
    headers = {"Content-Type": "application/json"}
    async with http.post(path, data=io.BytesIO(raw), headers=headers) as answer:
        text = await answer.text()
    assert answer.status < 500, (path, raw[:2000], text)
    assert '"server_error"' not in text, (path, raw[:2000], text)
    if answer.status >= 400:
        message = json.loads(text)["error"]["message"]
        assert message, (path, raw[:2000])
        assert "Traceback" not in message
        assert len(message) < 2000, (path, message[:300])
        if (param := json.loads(text)["error"].get("param")) is not None:
            sent = await asyncio.to_thread(
                was_sent, param, message, raw
            )  # the loop's own computing is measured
            assert sent, (path, param, message, raw[:2000])
    return answer.status


MISSING = ("required, but missing", "unknown field", "name one of", "needs tools", "expected either prompt")


def was_sent(param: str, message: str, raw: bytes) -> bool:
    """Tell whether a refusal names a field that the client sent, or one that it should have."""
    if any(text in message for text in MISSING):
        return True
    try:
        body = json.loads(raw)
    except (RecursionError, ValueError):  # what is ignored need not be text
        return True
    for part in re.findall(r"[^.\[\]]+", param):
        if isinstance(body, list):
            if int(part) >= len(body):
                return False
            body = body[int(part)]
        elif isinstance(body, dict):
            if part not in body:
                return False
            body = body[part]
        else:
            return False
    return True


@pytest.mark.slow
@pytest.mark.within(240)
@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.nightly)])
async def test_damaged_bodies_are_answered_or_refused(tmp_path: Path, count: int) -> None:
    rng = random.Random(21)
    statuses: dict[int, int] = {}
    async with tried(tmp_path) as (_, http):
        for _ in range(count):
            path, seed = rng.choice(SEEDS)
            streams = rng.random() < 0.3 and path in GENERATING
            status = await status_of(http, path, mutated(rng, dict(seed, stream=True) if streams else seed))
            statuses[status] = statuses.get(status, 0) + 1
    assert statuses[200] > count / 20
    assert statuses[400] > count / 4


def fillings() -> list[bytes]:
    """Make ten megabytes of text, escapes, wide text, digits, lists and keys."""
    return [
        b'"' + b"x" * BIG_BYTES + b'"',
        b'"' + b"\\u0001" * (BIG_BYTES // 6) + b'"',
        b'"' + "é😀".encode() * (BIG_BYTES // 6) + b'"',
        b"1" * BIG_BYTES,
        b"[" + b"[]," * (BIG_BYTES // 3) + b"1]",
        b"{" + b",".join(b'"%d":1' % number for number in range(BIG_BYTES // 10)) + b"}",
    ]


def filled(seed: dict[str, Any], number: int, filling: bytes) -> bytes:
    """Put a filling into a known or an unknown field."""
    body = copy.deepcopy(seed)
    found = places(body)
    container, key = (body, "extra") if number % 3 == 2 else found[number % len(found)]
    container[key] = "HERE"
    return json.dumps(body).encode().replace(b'"HERE"', filling)


@pytest.mark.slow
@pytest.mark.within(600)
@pytest.mark.parametrize("a_route", [1, pytest.param(6, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("body_bytes_max", [8 << 20, 16 << 20])
async def test_ten_megabytes_are_answered_or_refused(
    tmp_path: Path, body_bytes_max: int, a_route: int
) -> None:
    """Each route gets one of the fillings, in turn; every night all of them."""
    large = fillings()
    async with tried(tmp_path, body_bytes_max=body_bytes_max) as (_, http):
        for route, (path, seed) in enumerate(dict(reversed(SEEDS)).items()):
            for number in range(route, route + a_route):
                raw = filled(seed, number % len(large), large[number % len(large)])
                status = await status_of(http, path, raw)
                assert status == 413 or body_bytes_max > len(raw), (path, status)
