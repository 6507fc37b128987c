"""`penstock serve DIR --engine vllm` as people run it, through HTTP."""

import json
import os
import re
import signal
import subprocess
import sys

import openai
import psutil
import pytest


@pytest.fixture
def serve(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    running = []

    def start(model, *arguments):
        command = [sys.executable, "-m", "penstock", "serve", str(model), "--engine", "vllm", "--port", "0"]
        sizes = ("--set", "block_size=32", "--set", "roles.aggregated.kv_blocks=64", "--set")
        options = (*sizes, "roles.aggregated.weight_dtype=float32", "--engine-arg", "enforce_eager=true")
        running.append(
            subprocess.Popen(
                [*command, *options, "--set", "supervision.spare_processes=0", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        )
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def test_it_streams_chats_stops_and_leaves_nothing_behind(serve, model_dir, adapter_dir):
    adapter = f"lora_modules={{shift: {adapter_dir}}}"
    process = serve(model_dir, "--engine-arg", adapter, "--set", "roles.aggregated.adapters=[shift]")
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"ready +(http://\S+)", line):
            break
    else:
        pytest.fail("".join(said))
    client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=60)
    greedy = {"model": "tiny-llama", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    ask = greedy | {"messages": [{"role": "user", "content": "the quick brown fox " * 8}]}
    whole = client.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (24, "length")

    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert len(chunks) > 3, "as it comes"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 32

    stop = text[8:12]
    stopped = client.chat.completions.create(**ask, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"

    shifted = client.chat.completions.create(**ask | {"model": "shift"})
    assert shifted.choices[0].message.content != text
    schema = {"schema": {"type": "string", "enum": ["red", "blue"]}, "name": "color"}
    constrained = client.chat.completions.create(
        **ask | {"extra_body": {}, "response_format": {"type": "json_schema", "json_schema": schema}}
    )
    assert json.loads(constrained.choices[0].message.content) in {"red", "blue"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask | {"extra_body": {"structured_outputs": {"regex": "("}}})
    assert refused.value.param == "structured_outputs"

    processes = psutil.Process(process.pid).children(recursive=True)
    assert any("EngineCore" in " ".join(each.cmdline()) for each in processes)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    rest = process.stdout.read()
    assert "Traceback" not in "".join(said) + rest
