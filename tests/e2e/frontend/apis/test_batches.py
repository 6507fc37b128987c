"""Files and batches through the openai client: what becomes of every line, cancelling, expiry, other tenants, and a killed server."""

import asyncio
import codecs
import contextlib
import errno
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import openai
import pytest
from frontend_site import IDS, TEXT, Site, of_keys, serving

from penstock.core.errors import Overloaded
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.frontend import batch_run, batch_store
from penstock.frontend.batch_store import new_id
from tests.support.dispatcher import Script, speak

CHAT = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
SAY = speak([*IDS, 0], finish=FinishReason.STOP, at_once=1000)


def line(custom_id: str, url: str = CHAT, **fields: object) -> dict:
    body = {"messages": [{"role": "user", "content": custom_id}]} if url == CHAT else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny"} | body | fields}


def jsonl(lines: Iterable[object]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


@contextlib.asynccontextmanager
async def batching(
    tmp_path: Path, script: Script = SAY, *, tenants=None, body_bytes_max: int = 8 << 20, **batches
) -> AsyncIterator[Site]:
    """Serve with batches in `tmp_path`."""
    folder = {"directory": str(tmp_path / "b"), **batches}
    async with serving(script, tenants=tenants, body_bytes_max=body_bytes_max, batches=folder) as site:
        watching = asyncio.ensure_future(site.server.watch())
        try:
            yield site
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


async def start(
    client: openai.AsyncOpenAI,
    lines: Iterable[object],
    endpoint: str = CHAT,
    window: str = "24h",
    mark: bytes = b"",
):
    stored = await client.files.create(file=("in.jsonl", mark + jsonl(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=stored.id, endpoint=endpoint, completion_window=window, metadata={"of": "test"}
    )


async def until(client: openai.AsyncOpenAI, batch_id: str, holds: Callable[[object], bool]):
    """Ask for a batch until something holds."""
    while not holds(batch := await client.batches.retrieve(batch_id)):  # noqa: ASYNC110 - as clients do
        await asyncio.sleep(0.05)
    return batch


async def ended(client: openai.AsyncOpenAI, batch_id: str):
    return await until(client, batch_id, lambda batch: batch.status in ENDED)


async def read(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict]:
    """Give the lines of an output by custom id; each id is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]
    found = {item["custom_id"]: item for item in lines}
    assert len(found) == len(lines)
    return found


async def test_each_line_is_answered_or_says_why_not(tmp_path: Path) -> None:
    async with batching(tmp_path) as site:
        client = site.client
        lines = [line(f"r{index}") for index in range(12)]
        lines += [line("hot", temperature=9), line("none", model="none"), line("streamed", stream=True)]
        lines.append(line("large", messages=[{"role": "user", "content": "hello " * 20_000}]))
        batch = await start(client, lines, mark=codecs.BOM_UTF8)
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"of": "test"})
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 16, "completed": 12, "failed": 4}
        answers = await read(client, batch.output_file_id)
        assert set(answers) == {f"r{index}" for index in range(12)}
        for item in answers.values():
            assert item["response"]["status_code"] == 200
            assert item["response"]["body"]["choices"][0]["message"]["content"] == TEXT
            assert item["response"]["request_id"] == item["response"]["body"]["id"]
        errors = await read(client, batch.error_file_id)
        assert {name: item["response"]["status_code"] for name, item in errors.items()} == {
            "hot": 400, "none": 404, "streamed": 400, "large": 400,
        }  # fmt: skip
        assert (
            errors["hot"]["response"]["body"]["error"]["message"]
            == "temperature: must be >= 0 and <= 2, got 9.0"
        )
        assert [item.id for item in (await client.batches.list()).data] == [batch.id]
        files = [item async for item in await client.files.list()]
        assert sorted(item.purpose for item in files) == ["batch", "batch_output", "batch_output"]
        assert (await client.files.retrieve(batch.input_file_id)).filename == "in.jsonl"
        assert (await client.files.delete(batch.output_file_id)).deleted
        with pytest.raises(openai.NotFoundError, match="file_id: "):
            await client.files.content(batch.output_file_id)
        assert {request.priority for request in site.dispatcher.opened} == {-1000}


async def test_completions_and_embeddings(tmp_path: Path) -> None:
    async def script(request: Request) -> AsyncIterator[Delta]:
        if not request.embeds:
            async for delta in SAY(request):
                yield delta
            return
        yield Delta(
            request_id=request.request_id, finish_reason=FinishReason.LENGTH, embedding=b"\0\0\x80\x3f" * 4
        )

    async with batching(tmp_path, script) as site:
        for endpoint, fields in (
            ("/v1/completions", {"prompt": "hello", "max_tokens": 50}),
            ("/v1/embeddings", {"input": ["hello", "hi"]}),
            ("/v1/responses", {"input": "hello"}),
        ):
            batch = await start(site.client, [line("a", endpoint, **fields)], endpoint)
            batch = await ended(site.client, batch.id)
            answers = await read(site.client, batch.output_file_id)
            body = answers["a"]["response"]["body"]
            if endpoint == "/v1/embeddings":
                assert [item["embedding"] for item in body["data"]] == [[0.5] * 4] * 2
            elif endpoint == "/v1/completions":
                assert body["choices"][0]["text"].strip() == TEXT
            else:
                assert body["output"][0]["content"][0]["text"] == TEXT


WRONG: list[tuple[list[object], str, int | None]] = [
    ([], "empty_file", None),
    ([line("a"), "text"], "invalid_json_line", 2),
    ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
    ([line("a") | {"method": "GET"}], "invalid_method", 1),
    ([line("a", "/v1/completions")], "invalid_url", 1),
    ([line("a") | {"body": [1]}], "invalid_body", 1),
    ([line("")], "invalid_custom_id", 1),
    ([line("a", user="x" * 9000)], "line_too_long", 1),
    ([line(str(index)) for index in range(12)], "too_many_requests", 11),
]
"""Lines, the code of the error, and the number of the line that it names."""


async def test_a_wrong_input_fails_the_batch(tmp_path: Path) -> None:
    async with batching(tmp_path, requests_max=10, body_bytes_max=8192) as site:
        for lines, code, number in WRONG:
            batch = await ended(site.client, (await start(site.client, lines)).id)
            assert (batch.status, batch.output_file_id) == ("failed", None)
            assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
        assert site.dispatcher.opened == []


async def test_it_is_cancelled_or_expires_with_what_it_has(tmp_path: Path) -> None:
    stuck = 0

    async def script(request: Request) -> AsyncIterator[Delta]:
        nonlocal stuck
        if request.sampling.max_tokens == 7:
            stuck += 1
            await asyncio.sleep(3600)
        async for delta in SAY(request):
            yield delta

    async with batching(tmp_path, script) as site:
        lines = [
            *(line(f"r{index}") for index in range(5)),
            *(line(f"s{index}", max_tokens=7) for index in range(30)),
        ]
        for window in ("24h", "6s"):
            batch = await start(site.client, lines, window=window)
            if window == "24h":
                await until(
                    site.client, batch.id, lambda batch: batch.request_counts.completed == 5 and stuck > 10
                )
                assert (await site.client.batches.cancel(batch.id)).status == "cancelling"
                with pytest.raises(openai.ConflictError, match="cancel it first"):
                    await site.client.files.delete(batch.input_file_id)
            batch = await ended(site.client, batch.id)
            assert set(await read(site.client, batch.output_file_id)) == {f"r{index}" for index in range(5)}
            errors = await read(site.client, batch.error_file_id)
            if window == "24h":
                assert (batch.status, errors) == ("cancelled", {})
                with pytest.raises(openai.ConflictError, match="only a batch that has not ended"):
                    await site.client.batches.cancel(batch.id)
            else:
                assert batch.status == "expired"
                assert {item["error"]["code"] for item in errors.values()} == {"batch_expired"}
                assert set(errors) == {f"s{index}" for index in range(30)}
            await site.until(lambda: site.dispatcher.open_streams == 0)


async def test_a_busy_server_is_asked_again_and_others_go_first(tmp_path: Path) -> None:
    refused: set[str] = set()
    most = {"alone": 0, "beside": 0}
    blocked, several = asyncio.Event(), asyncio.Event()
    running = 0

    async def script(request: Request) -> AsyncIterator[Delta]:
        nonlocal running
        if request.priority == 0:  # not of a batch
            await blocked.wait()
        else:
            name = request.token_ids.hex()
            if name not in refused:
                refused.add(name)
                raise Overloaded("every worker is busy", retry_after_s=0.01)
            running += 1
            key = "alone" if blocked.is_set() else "beside"
            most[key] = max(most[key], running)
            if running > 2:
                several.set()
            await (several.wait() if blocked.is_set() else asyncio.sleep(0.02))
            running -= 1
        async for delta in SAY(request):
            yield delta

    async with batching(tmp_path, script, at_once=8) as site:
        other = asyncio.ensure_future(
            site.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "me"}])
        )
        await site.until(lambda: site.dispatcher.open_streams == 1)
        batch = await start(site.client, [line(f"r{index}") for index in range(100)])
        await until(site.client, batch.id, lambda batch: batch.request_counts.completed >= 3)
        blocked.set()
        assert (await other).choices[0].message.content == TEXT
        batch = await ended(site.client, batch.id)
        assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
        assert most["beside"] <= 1
        assert 2 < most["alone"] <= 8, "those that run alone wait until they are several"


async def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    async with batching(tmp_path, tenants=of_keys("one", "other")) as site:
        one, other = (site.client.with_options(api_key=key) for key in ("one", "other"))
        batch = await ended(one, (await start(one, [line("a")])).id)
        assert await read(one, batch.output_file_id)
        assert {(request.tenant, bool(request.salt)) for request in site.dispatcher.opened} == {
            ("tenant-one", True)
        }
        assert (await other.batches.list()).data == []
        assert [item async for item in await other.files.list()] == []
        for asks in (
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id),
            other.files.delete(batch.input_file_id),
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await asks
        with pytest.raises(openai.AuthenticationError):
            await site.client.batches.list()


async def test_a_full_disk_loses_nothing_and_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, refused, append, write = [True], [], batch_run._append, batch_store.write_whole

    def fill(then: Callable[..., None]) -> Callable[[Path, bytes], None]:
        def written(path: Path, data: bytes) -> None:
            if full[0]:
                refused.append(path)
                raise OSError(errno.ENOSPC, "No space left on device")
            then(path, data)

        return written

    monkeypatch.setattr(batch_run, "_DISK_PAUSE_S", 0.05)
    monkeypatch.setattr(batch_run, "_append", fill(append))
    async with batching(tmp_path) as site:
        batch = await start(site.client, [line(name, max_tokens=3) for name in "abc"])
        await site.until(lambda: len(refused) >= 2)
        assert (await site.client.batches.retrieve(batch.id)).status == "in_progress"
        monkeypatch.setattr(batch_store, "write_whole", fill(write))
        answer = await site.ask("POST", "/v1/files", *form((FILE, b"{}"), ('name="purpose"', b"batch")))
        assert (answer.status, answer.headers["retry-after"]) == (503, "30")
        assert "cannot be read or written here: no space left on device" in answer.error["message"]
        full[0] = False
        batch = await ended(site.client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)
        assert set(await read(site.client, batch.output_file_id)) == set("abc")


async def test_a_tenants_large_batch_gives_way_to_tenants_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_SCAN_S": 0.1, "_TENANTS_AT_ONCE": 1, "_TURN_S": 0.0}.items():
        monkeypatch.setattr(batch_run, name, value)
    answered: list[str] = []
    waits = asyncio.Event()

    async def script(request: Request) -> AsyncIterator[Delta]:
        if request.tenant == "tenant-flood":
            await waits.wait()
            await asyncio.sleep(0.05)
        answered.append(request.tenant)
        async for delta in SAY(request):
            yield delta

    async with batching(tmp_path, script, tenants=of_keys("flood", "other"), at_once=2) as site:
        flood, other = (site.client.with_options(api_key=key) for key in ("flood", "other"))
        large = await start(flood, [line(f"r{index}") for index in range(100)])
        await site.until(lambda: site.dispatcher.open_streams > 0)
        small = await start(other, [line("a")])
        waits.set()
        assert (await ended(other, small.id)).status == "completed"
        large = await ended(flood, large.id)
        assert (large.status, large.request_counts.completed) == ("completed", 100)
        assert len(await read(flood, large.output_file_id)) == 100
        assert len(answered) == 101, "none was asked twice"
        assert answered.index("tenant-other") < 90


async def test_a_batch_that_cannot_be_read_holds_up_no_other(tmp_path: Path) -> None:
    damaged = tmp_path / "b" / "tenant-0" / "batches"
    damaged.mkdir(parents=True)
    (damaged / f"{new_id('batch_')}.json").write_bytes(b'{"batch":')
    async with batching(tmp_path) as site:
        batch = await start(site.client, [line("a", max_tokens=3)])
        assert (await ended(site.client, batch.id)).status == "completed"


def form(*parts: tuple[str, bytes]) -> tuple[bytes, str]:
    whole = b"".join(
        b"--b\r\nContent-Disposition: form-data; "
        + head.encode(errors="surrogateescape")
        + b"\r\n\r\n"
        + body
        + b"\r\n"
        for head, body in parts
    )
    return whole + b"--b--\r\n", "Content-Type: multipart/form-data; boundary=b"


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


FILE = 'name="file"; filename="a"'


WRONG_UPLOADS = [
    (form(('name="purpose"', b"batch")), 400, "file: required, but missing"),
    (form((FILE, b"{}")), 400, "purpose: required, but missing"),
    (form((FILE, b"{}"), ('name="purpose"', b"tune")), 400, "purpose: must be 'batch', got 'tune'"),
    (form(('name="purpose"', b"x" * 5000)), 400, "purpose: has over 4096 bytes"),
    (form((FILE, b"x" * 3000), ('name="purpose"', b"batch")), 413, "file: is larger than 2048 bytes; split it"),
    (form(('name="\x00\x07"', b"")), 400, "the body is no valid form: 400, message: Invalid"),
    ((b"{}", "Content-Type: application/json"), 415, "Content-Type: must be multipart/form-data"),
    ((b"nothing", "Content-Type: multipart/form-data"), 400, "the body is no valid form"),
    ((b"nothing", "Content-Type: multipart/form-data; boundary=b"), 400, "the body is no valid form"),
]  # fmt: skip
"""Body and content type, the status, and how the message begins."""


async def test_a_wrong_upload_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with batching(tmp_path, file_bytes_max=2048) as site:
        for body, status, message in WRONG_UPLOADS:
            answer = await site.ask("POST", "/v1/files", *body)
            assert (answer.status, answer.error["message"][: len(message)]) == (status, message)
    assert files_in(tmp_path) == []


async def test_a_file_name_of_other_bytes_than_utf_8_is_kept_as_far_as_it_is_text(tmp_path: Path) -> None:
    async with batching(tmp_path) as site:
        named = FILE.replace('filename="a"', 'filename="a\udcff\udcfe"')
        answer = await site.ask("POST", "/v1/files", *form((named, b"{}"), ('name="purpose"', b"batch")))
        assert (answer.status, answer.json["filename"]) == (200, "a??")


async def test_bounds_and_bad_fields_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "FILES_MAX", 2)
    async with batching(tmp_path) as site:
        client = site.client
        stored = await client.files.create(
            file=("in.jsonl", jsonl([line("a", max_tokens=3)])), purpose="batch"
        )

        async def refused(**fields: object) -> str:
            asked = {"input_file_id": stored.id, "endpoint": CHAT, "completion_window": "24h"} | fields
            with pytest.raises(openai.APIStatusError) as error:
                await client.batches.create(**asked)  # type: ignore[arg-type]
            return error.value.body["message"]

        assert (await refused(endpoint="/v1/audio")).startswith(
            "endpoint: must be one of /v1/chat/completions, "
        )
        assert (
            await refused(completion_window="9d")
        ) == "completion_window: must be a time of at most 7d, such as '24h', got '9d'"
        assert (await refused(input_file_id="../../etc")) == "input_file_id: '../../etc' does not exist"
        assert (await refused(metadata={str(n): "" for n in range(17)})).startswith(
            "metadata: at most 16 keys"
        )
        for path, says in (
            ("/v1/files?limit=0", "limit: must be >= 1 and <= 10000, got '0'"),
            ("/v1/batches?limit=x", "limit: must be >= 1 and <= 100, got 'x'"),
            ("/v1/batches?after=x", "after: 'x' is not in the list; leave it out"),
            ("/v1/files?order=up", "order: must be one of desc, asc, got 'up'"),
        ):
            assert (await site.ask("GET", path)).error["message"] == says
        await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="there are 2 files already, and a tenant may have 2"):
            await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")


async def test_without_a_directory_there_are_none() -> None:
    async with serving() as site:
        answer = await site.ask("GET", "/v1/batches")
        assert answer.status == 404
        assert answer.error["message"].endswith("its operator can set frontend.batches.directory")
