"""Two llama.cpp servers as workers: equal tokens, and a stream that survives the end of its server."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.demo import MODEL_DIR, MODEL_NAME

pytest.importorskip("xllamacpp", reason="`make test` installs it")
pytest.importorskip("gguf", reason="`make test` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.engine]

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
PROMPT = TOKENIZER.encode("Tell me about penstocks, please.").ids
COUNT = 48


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.gguf_model import write_gguf

    return write_gguf(MODEL_DIR, tmp_path_factory.mktemp("llamacpp") / "demo.gguf")


@contextlib.contextmanager
def running(gguf: Path, count: int) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run servers; gives each one's process by its URL."""
    command = [sys.executable, "-m", "tests.support.llamacpp_server", str(gguf), MODEL_NAME]
    servers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(count)
    ]
    try:
        assert all(server.stdout is not None for server in servers)
        yield {server.stdout.readline().strip(): server for server in servers if server.stdout is not None}
    finally:
        for server in servers:
            server.kill()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()


def generated() -> str:
    """Give the model's greedy text, as transformers computes it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, pad_token_id=0
    )
    return TOKENIZER.decode(ids[0, len(PROMPT) :].tolist())


def roles(servers: dict[str, subprocess.Popen[str]]) -> dict[str, object]:
    args = {"url": list(servers), "health": {"interval_s": 0.1, "retry_s_max": 0.3}}
    return {"aggregated": {"engine": {"name": "openai", "args": args}}}


def test_greedy_text_is_the_models_also_when_its_server_is_killed(deploy, gguf):
    expected = generated()
    with running(gguf, 2) as servers:

        async def scenario(site):
            asked = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0.0}
            answer = await site.client.completions.create(**asked, extra_body={"ignore_eos": True})
            assert answer.choices[0].text == expected
            assert answer.usage.completion_tokens == COUNT
            cached = []
            for _ in servers:  # the first of them may have gone to the other server
                again = await site.client.completions.create(**asked, extra_body={"ignore_eos": True})
                cached.append(again.usage.prompt_tokens_details.cached_tokens)
            assert max(cached) > 0, "llama.cpp says what it had cached"

            told = (
                (await site.client.completions.create(**asked | {"max_tokens": 4}, logprobs=2))
                .choices[0]
                .logprobs
            )
            assert all(value <= 0 for value in told.token_logprobs)
            body = asked | {"min_tokens": 2}
            async with site.http.post(f"{site.url}/v1/completions", json=body) as response:
                assert response.status == 400
                assert "llama.cpp has no such field" in (await response.json())["error"]["message"]

            text, count = "", 0
            stream = await site.client.completions.create(
                **asked, stream=True, extra_body={"ignore_eos": True}
            )
            async for chunk in stream:
                text += chunk.choices[0].text if chunk.choices else ""
                count += 1
                if count == 8:
                    (busy,) = [w for w in (await site.workers()).values() if w["open_requests"]]
                    list(servers.values())[int(busy["name"].removeprefix("worker-")) - 1].kill()
            assert text == expected

        deploy(scenario, roles=roles(servers))
