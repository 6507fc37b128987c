"""What a vLLM that cannot start, or that dies, says and leaves behind."""

import json
import os
import shutil
import signal

import psutil
import pytest

from penstock.core.errors import ConfigError, EngineError
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from tests.vllm.conftest import vllm_processes


def changed(model_dir, path, **fields):
    shutil.copytree(model_dir, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return str(path)


def one_line(started, spec) -> str:
    with pytest.raises(ConfigError) as failed:
        started(spec)
    text = failed.value.message
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def test_wrong_arguments_are_refused_before_anything_starts(started, spec_of):
    assert "engine_args: scheduling_policy: Input should be 'fcfs' or 'priority', got 'lifo'" in one_line(
        started, spec_of(args={"scheduling_policy": "lifo"})
    )
    assert "device cuda:0: the vLLM installed here is a build for CPUs" in one_line(
        started, spec_of(device="cuda:0")
    )


def test_a_first_step_of_one_token_in_bfloat16_does_not_kill_vllm(started, spec_of):
    """On CPUs with AMX it did: nothing had asked the kernel for tiles before a first long prompt."""
    running = started(spec_of(dtype="bfloat16"))
    for number in range(2):
        request = Request(
            request_id=f"short-{number}",
            model="tiny",
            token_ids=pack_tokens([7]),
            sampling=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        )
        (answer,) = running.answers(request)
        assert len(answer.token_ids) == 4


def test_a_model_that_vllm_refuses_is_named_with_the_reason(started, spec_of, model_dir, tmp_path):
    unknown = changed(
        model_dir, tmp_path / "unknown", architectures=["PenguinForCausalLM"], model_type="penguin"
    )
    text = one_line(started, spec_of(model=unknown))
    assert "penguin" in text.lower()
    assert not vllm_processes()


def test_a_failure_in_vllms_own_processes_is_told_with_its_cause(started, spec_of, model_dir, tmp_path):
    wider = changed(model_dir, tmp_path / "wider", intermediate_size=777)
    text = one_line(started, spec_of(model=wider))
    assert text.startswith("engine vllm: ")
    assert "shape" in text or "size" in text, text
    assert "root cause" not in text
    assert not vllm_processes()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("EngineCore", "its engine core has ended: killed by SIGKILL"),
        pytest.param("VLLM::Worker", "", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_process_ends_the_steps_and_close_leaves_nothing(started, spec_of, name, why):
    running = started(spec_of())
    request = Request(
        request_id="long",
        model="tiny",
        token_ids=pack_tokens(range(5, 45)),
        sampling=SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True),
    )
    assert running.answers(request, steps=3)[0].token_ids
    victim = next(
        each
        for each in psutil.Process().children(recursive=True)
        if name in each.name() + str(each.cmdline())
    )
    os.kill(victim.pid, signal.SIGKILL)

    async def consume():
        while True:
            await running.next_step()

    with pytest.raises(EngineError, match=f"vLLM died: {why}") as died:
        running.do(consume())
    assert "above" not in died.value.message, "nobody sees what vLLM printed"
    running.do(running.engine.close())
    psutil.wait_procs(vllm_processes(), timeout=20)
    assert not vllm_processes()
    running.do(running.engine.close())
