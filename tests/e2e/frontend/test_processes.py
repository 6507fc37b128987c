"""Real frontend processes: two on one port, a tenant's places over both, slow readers, and what is left when they are killed."""

import asyncio
import json
import os
import shutil
import signal
import socket
from contextlib import aclosing
from pathlib import Path

import aiohttp
import openai
import psutil
import pytest

from penstock.demo import MODEL_DIR
from penstock.deploy.state import load_admin_token
from penstock.frontend.limits.keys import hash_of, new_key

pytestmark = pytest.mark.slow
STREAMS = 6
WORKERS = ("worker-1", "worker-2")


class FrontendConnection:
    """One connection, and so one frontend process: the kernel deals connections out by their ports."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, method: str, path: str, body: bytes = b"") -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {load_admin_token()}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def answer(self, method: str, path: str, **fields: object) -> tuple[int, dict]:
        """Ask, and give the status and the body."""
        await self.ask(method, path, json.dumps(fields).encode() if fields else b"")
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split()[0])
        return int(head.split()[1]), json.loads(await self.reader.readexactly(length))

    async def workers(self) -> tuple[int, dict[str, dict]]:
        """Give the process that answers, and the workers as it sees them."""
        _, answer = await self.answer("GET", "/admin/workers")
        return answer["pid"], {worker["name"]: worker for worker in answer["workers"]}

    async def begin(self, prompt: str) -> None:
        """Begin an answer that takes long, and read its first bytes."""
        body = {
            "model": "penstock-demo",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 1000,
            "stream": True,
            "ignore_eos": True,
        }
        await self.ask("POST", "/v1/chat/completions", json.dumps(body).encode())
        await self.reader.readuntil(b"data: ")

    def close(self) -> None:
        self.writer.close()


async def connections(site) -> dict[int, FrontendConnection]:
    """Connect until both processes have been met; give a connection to each, by its pid."""
    host, port = site.url.removeprefix("http://").split(":")
    found: dict[int, FrontendConnection] = {}
    while len(found) < 2:
        connection = FrontendConnection(*await asyncio.open_connection(host, int(port)))
        pid, workers = await connection.workers()
        if pid in found or len(workers) < len(WORKERS):
            connection.close()
        else:
            found[pid] = connection
    return found


def of_peers(workers: dict[str, dict], name: str) -> int:
    return sum((worker["load"] or {})[name] for worker in workers.values())


def test_a_frontend_sees_its_peers_requests_and_they_go_with_its_peer(deploy):
    async def scenario(site):
        met = await connections(site)
        (mine, my_connection), (theirs, their_connection) = met.items()

        async def sees(connection, **figures):
            _, workers = await connection.workers()
            return all(of_peers(workers, f"peer_{name}") == value for name, value in figures.items())

        assert await sees(my_connection, requests=0)
        host, port = site.url.removeprefix("http://").split(":")
        streams = []
        while len(streams) < STREAMS:
            connection = FrontendConnection(*await asyncio.open_connection(host, int(port)))
            pid, _ = await connection.workers()
            if pid == theirs:
                await connection.begin(f"Tell me of river {len(streams)}. " * 20)
                streams.append(connection)
            else:
                connection.close()
        await site.until(lambda: sees(my_connection, requests=STREAMS, arrivals=STREAMS))
        assert await sees(their_connection, requests=0, arrivals=0)
        _, workers = await my_connection.workers()
        assert [workers[name]["load"]["peers"] for name in WORKERS] == [1, 1]
        assert not any(workers[name]["open_requests"] for name in WORKERS), "none of them are its own"

        psutil.Process(theirs).kill()
        await site.until(lambda: sees(my_connection, requests=0, prefill_tokens=0))
        for connection in (*streams, my_connection, their_connection):
            connection.close()
        assert (await site.tell("Are you still there?", max_tokens=4))[1].completion_tokens == 4
        pids = site.deployment.pids().values()
        assert mine in pids
        assert theirs not in pids

    deploy(scenario, workers=2, frontends=2)


def test_an_answer_of_one_process_is_gone_on_with_given_and_deleted_by_the_other(deploy):
    async def scenario(site):
        first, second = (await connections(site)).values()
        said = {"model": "penstock-demo", "input": "hi", "max_output_tokens": 4}
        _, kept = await first.answer("POST", "/v1/responses", **said)
        path = f"/v1/responses/{kept['id']}"
        status, later = await second.answer("POST", "/v1/responses", **said, previous_response_id=kept["id"])
        assert (status, later["usage"]["input_tokens"] > kept["usage"]["input_tokens"]) == (200, True)
        assert (await second.answer("GET", path))[1] == kept
        assert (await second.answer("DELETE", path))[1]["deleted"] is True
        for connection in (first, second):
            assert (await connection.answer("GET", path))[0] == 404
            connection.close()

    deploy(scenario, workers=2, frontends=2)


def test_a_frontend_that_is_started_again_knows_the_workers_before_it_answers(deploy):
    async def scenario(site):
        met = await connections(site)
        for connection in met.values():
            connection.close()
        psutil.Process(min(met)).kill()
        host, port = site.url.removeprefix("http://").split(":")
        seen = set(met)
        while seen == set(met):
            try:
                connection = FrontendConnection(*await asyncio.open_connection(host, int(port)))
                pid, workers = await connection.workers()
            except (ConnectionError, asyncio.IncompleteReadError):  # it went to the one that was killed
                continue
            connection.close()
            seen.add(pid)
            assert {name: worker["condition"] for name, worker in workers.items()} == dict.fromkeys(
                WORKERS, "ready"
            )

    deploy(scenario, workers=2, frontends=2)


PLACES, TRIES = 4, 12


def test_a_concurrency_holds_over_both_processes(deploy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    key = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"tenants:\n  wide:\n    concurrency: {PLACES}\n    keys: [{hash_of(key)}]\n")

    async def scenario(site) -> None:
        def ask(max_tokens: int):
            """Ask on a connection of its own, so that each process is asked."""
            headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
            said = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "stream": True}
            body = {"model": "penstock-demo", "max_tokens": max_tokens} | said
            return site.http.post(f"{site.url}/v1/chat/completions", json=body, headers=headers)

        held = [await ask(1000) for _ in range(PLACES)]
        assert {response.status for response in held} == {200}

        async def all_are_refused() -> bool:
            for _ in range(TRIES):
                async with ask(1) as response:
                    if response.status == 200:
                        return False
                    assert (response.status, response.headers["Retry-After"]) == (429, "1")
                    assert "its limit concurrency is 4" in (await response.json())["error"]["message"]
            return True

        await site.until(all_are_refused)
        assert not any(response.content.is_eof() for response in held), "all of them are still in flight"
        for response in held:
            response.close()

        async def is_free() -> bool:
            async with ask(1) as response:
                return response.status == 200

        await site.until(is_free)

    frontend = {"port": 0, "processes": 2, "drain_timeout_s": 10, "api_key_file": str(file)}
    deploy(scenario, workers=2, frontend=frontend, role={"mock": {"timing": {"step_s": 0.1}}}, timeout_s=120)


ASKED = "Which parts does a request pass on its way, and what does each of them do with it? "
LONG = 36
"""So often asked, a prompt takes dozens of steps."""
TOKENS = 1500
"""More than is answered before the kill is noticed."""
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}
ROLE = {"replicas": 1, "engine": "paged", "max_batch_tokens": 64}
PAIR = ("prefill-1", "decode-1")


async def loads(site, names=PAIR):
    """What these workers say, as soon as a frontend answers that knows them."""
    try:
        workers = await site.workers()
    except aiohttp.ClientError:
        return None
    found = {name: workers[name]["load"] for name in names if name in workers and workers[name]["load"]}
    return found if len(found) == len(names) else None


async def until_free(site, names=PAIR):
    """Wait until they have no request, and no block is held by whatever: pins and fetches count among the active ones."""

    async def holds():
        now = await loads(site, names)
        held = ("running_requests", "waiting_requests", "active_blocks")
        return now is not None and not any(load[name] for load in now.values() for name in held)

    await site.until(holds)


async def until_held(site):
    """Wait until the prefill worker says that a prompt's blocks are held, though it has nothing to compute."""

    async def holds():
        load = (await loads(site))["prefill-1"]
        return load["active_blocks"] > 0 and load["running_requests"] == load["waiting_requests"] == 0

    await site.until(holds)


async def until_computed(site, before, *, tokens):
    """Wait until the prefill worker has computed some more tokens, and holds blocks."""

    async def holds():
        load = (await loads(site))["prefill-1"]
        return load["prefilled_tokens"] - before["prefilled_tokens"] >= tokens and load["active_blocks"] > 0

    await site.until(holds)


@pytest.mark.parametrize("stream_kv", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_workers_stop_and_hold_nothing_and_its_successor_gets_exact_answers(deploy, stream_kv):
    async def scenario(site):
        shorter = {moment: f"{moment} {ASKED * 4}" for moment in ("first token", "decoding")}
        whole = {moment: (await site.tell(prompt, max_tokens=24))[0] for moment, prompt in shorter.items()}

        long = ASKED * LONG
        before = await loads(site)
        asking = asyncio.ensure_future(site.tell(long, max_tokens=24))
        await until_computed(site, before["prefill-1"], tokens=1)
        site.kill("frontend-1")
        with pytest.raises(openai.APIError):
            await asking
        await until_free(site)
        after = await loads(site)
        computed = after["prefill-1"]["prefilled_tokens"] - before["prefill-1"]["prefilled_tokens"]
        _, usage = await site.tell(long, max_tokens=1)
        assert 0 < computed < usage.prompt_tokens, "nobody waited for the rest"
        assert after["prefill-1"]["generated_tokens"] == before["prefill-1"]["generated_tokens"]

        decode = site.deployment.pids()["decode-1"]
        for moment, prompt in shorter.items():
            before = await loads(site)
            if moment == "first token":
                os.kill(decode, signal.SIGSTOP)  # it fetches nothing while the frontend dies
            try:
                async with aclosing(site.stream(f"{prompt} Go on.", max_tokens=TOKENS)) as answer:
                    for _ in range(1 if moment == "first token" else 8):
                        await anext(answer)
                    if moment == "first token":
                        await until_held(site)
                    site.kill("frontend-1")
                    with pytest.raises(openai.APIError):
                        async for _ in answer:
                            pass
                if moment == "first token":
                    await until_free(site, ["prefill-1"])
            finally:
                os.kill(decode, signal.SIGCONT)
            await until_free(site)
            after = await loads(site)
            answered = after["decode-1"]["generated_tokens"] - before["decode-1"]["generated_tokens"]
            assert answered < TOKENS - 1, "nobody answered to the end"
            assert (await site.tell(prompt, max_tokens=24))[0] == whole[moment]
        await until_free(site)

    deploy(
        scenario,
        roles={"prefill": ROLE, "decode": ROLE},
        router=ALWAYS,
        worker={"kv_transfer": {"stream_kv": stream_kv, "pin_ttl_s": 600}},
        timeout_s=300,
    )


LINES = 150
SLOW = {"mock": {"timing": {"step_s": 0.02}}}


def lines() -> bytes:
    body = {"model": "penstock-demo", "max_tokens": 8}
    return b"".join(
        json.dumps(
            {
                "custom_id": f"r{index}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body | {"messages": [{"role": "user", "content": f"say {index}"}]},
            }
        ).encode()
        + b"\n"
        for index in range(LINES)
    )


def test_each_line_is_answered_once(deploy, tmp_path):
    batches = {"directory": str(tmp_path / "batches"), "at_once": 4}
    frontend = {"port": 0, "processes": 2, "drain_timeout_s": 1, "batches": batches}
    started = {}

    async def answered(site, batch_id: str) -> int:
        try:
            counts = (await site.client.batches.retrieve(batch_id)).request_counts
        except Exception:  # noqa: BLE001 - the frontend that was asked is the killed one
            return 0
        return counts.completed

    async def first(site):
        stored = await site.client.files.create(file=("in.jsonl", lines()), purpose="batch")
        batch = await site.client.batches.create(
            input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        started["id"] = batch.id

        async def some() -> bool:
            return await answered(site, batch.id) >= 20

        await site.until(some)
        for name, pid in site.deployment.pids().items():
            if name.startswith("frontend"):
                os.kill(pid, signal.SIGKILL)

        async def more() -> bool:
            return await answered(site, batch.id) >= 60

        await site.until(more)

    async def second(site):
        async def completed() -> bool:
            batch = await site.client.batches.retrieve(started["id"])
            started["batch"] = batch
            return batch.status == "completed"

        await site.until(completed, timeout_s=120)
        batch = started["batch"]
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
        assert batch.error_file_id is None
        output = (await site.client.files.content(batch.output_file_id)).text.splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in output) == sorted(
            f"r{i}" for i in range(LINES)
        )
        answers = [json.loads(line)["response"]["body"] for line in output]
        assert {answer["usage"]["completion_tokens"] for answer in answers} <= set(range(1, 9))

    deploy(first, frontend=frontend, timeout_s=180, role=SLOW)
    deploy(second, frontend=frontend, timeout_s=180, role=SLOW)


BODY = {
    "model": "penstock-demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4000,
    "seed": 7,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
    "ignore_eos": True,
}


async def connect(url, receive_bytes):
    """Connect a socket that takes little at once; the kernel heeds the size only before it connects."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return client


def request_of(asked):
    """Word a request after whose answer the server closes: a refusal must not look like a stream that stands still."""
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def begin(url):
    """Ask for a stream by a socket that takes little at once."""
    reader, writer = await asyncio.open_connection(sock=await connect(url, 65536), limit=1 << 18)
    writer.write(request_of(BODY))
    return reader, writer


async def read_at_pace(url, asked, bytes_per_s):
    """Ask and read an answer to its end, 4 KiB at a time and never ahead of the pace; give what came."""
    loop = asyncio.get_running_loop()
    came = bytearray()
    with await connect(url, 4096) as client:
        await loop.sock_sendall(client, request_of(asked))
        began_s = loop.time()
        while part := await loop.sock_recv(client, 4096):
            came += part
            await asyncio.sleep(began_s + len(came) / bytes_per_s - loop.time())
    return bytes(came)


def reader_of(came):
    reader = asyncio.StreamReader(limit=1 << 20)
    reader.feed_data(came)
    reader.feed_eof()
    return reader


async def tokens_of(reader):
    """Read a stream to its end; give the tokens' texts, of which each has log-probabilities."""
    tokens = []
    while (line := await reader.readline()) != b"data: [DONE]\n":
        assert line, "cut off"
        if line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content", ())]
    return tokens


async def parked(site):
    async with site.http.get(f"{site.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(
        float(line.split()[1]) for line in lines if line.startswith("penstock_router_parked_requests_total")
    )


QUICK = {"mock": {"timing": {"step_s": 0.0005}}}


def test_a_slow_reader_is_waited_for_and_loses_nothing(deploy):
    async def scenario(site):
        reader, writer = await begin(site.url)

        async def has_left_its_engine():
            load = await site.load("worker-1")
            return load["generated_tokens"] > 0 and load["running_requests"] == load["active_blocks"] == 0

        await site.until(has_left_its_engine)
        slow = await tokens_of(reader)
        assert len(slow) == BODY["max_tokens"]
        assert await parked(site) > 0, "it had left before its end"
        writer.close()
        reader, writer = await begin(site.url)
        assert await tokens_of(reader) == slow, "as who reads at once"
        writer.close()

    plane = {"stream_bytes_max": 65536, "window_tokens": 64}
    frontend = {"port": 0, "write_buffer_bytes": 4096}
    deploy(scenario, role=QUICK, request_plane=plane, frontend=frontend, timeout_s=120)


@pytest.mark.nightly
def test_a_reader_at_77_kb_a_second_gets_all_of_8000_tokens(deploy, tmp_path):
    model = tmp_path / "penstock-demo"
    shutil.copytree(MODEL_DIR, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_000}))
    asked = BODY | {"max_tokens": 8000, "top_logprobs": 5}

    async def scenario(site):
        expected = await read_at_pace(site.url, asked, 1e9)
        before = await parked(site)
        slow = await tokens_of(reader_of(await read_at_pace(site.url, asked, 77_000)))
        assert len(slow) == 8000
        assert slow == await tokens_of(reader_of(expected))
        assert await parked(site) > before, "its engine did without it"

    deploy(scenario, model=str(model), role=QUICK, timeout_s=240)
