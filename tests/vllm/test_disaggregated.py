"""`penstock serve --engine vllm --prefill 1 --decode 2`: vLLM's NixlConnector moves the KV, whoever is killed, beside KV tiers."""

import os
import signal
import tempfile
import threading
import time

import httpx
import psutil
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.processes.served import served
from penstock.deploy.state import load_admin_token
from tests.vllm.conftest import vllm_processes
from tests.vllm.test_engine import greedy, prompt

TOKENS = 48
LONG_TOKENS = 300
ROLE = {"kv_blocks": 64, "weight_dtype": "float32", "kv.host": "8x"}
GRAPH = {
    "block_size": 32,
    "context_length": 512,
    "router.disagg.remote_tokens_min": 1,
    "router.policy": "least-loaded",
}


class Site:
    """A deployment of real workers, asked over HTTP."""

    def __init__(self, deployment, model):
        self._http = httpx.Client(base_url=deployment.url, timeout=120)
        self._admin = {"Authorization": f"Bearer {load_admin_token()}"}
        self._name = deployment.model
        self._model = model
        self._tokenizer = None

    def expected(self, ids, tokens):
        """Give the text that transformers generates greedily."""
        self._tokenizer = self._tokenizer or Tokenizer.from_file(f"{self._model.name_or_path}/tokenizer.json")
        return self._tokenizer.decode(greedy(self._model, ids, tokens), skip_special_tokens=True)

    def pieces(self, ids, tokens):
        """Stream a greedy completion of token ids, piece by piece."""
        body = {
            "model": self._name, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = httpx.Response(200, content=line[6:]).json()
                    assert "error" not in chunk, chunk
                    yield chunk["choices"][0]["text"] if chunk["choices"] else ""

    def tell(self, ids, tokens=TOKENS):
        return "".join(self.pieces(ids, tokens))

    def loads(self):
        answer = self._http.get("/admin/workers", headers=self._admin).json()
        return {worker["name"]: worker["load"] or {} for worker in answer["workers"]}

    def decoding(self, figure):
        return sum(load.get(figure, 0) for name, load in self.loads().items() if name.startswith("decode"))

    def metric(self, line):
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(each.split()[-1]) for each in lines if each.startswith(line))

    def until(self, holds, timeout_s=20.0):
        end_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end_s, self.loads()
            time.sleep(0.02)

    def process(self, name):
        """Find a worker's process."""
        (found,) = (
            each
            for each in psutil.Process().children(recursive=True)
            if each.status() != psutil.STATUS_ZOMBIE and name in " ".join(each.cmdline()).split()
        )
        return found

    def kill(self, name):
        """Kill a worker with the processes of its vLLM."""
        worker = self.process(name)
        for each in [*worker.children(recursive=True), worker]:
            each.kill()


@pytest.fixture(scope="module")
def site(model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    flags = [f"--set={name}={value}" for name, value in GRAPH.items()]
    flags += [
        f"--set=roles.{role}.{name}={value}" for role in ("prefill", "decode") for name, value in ROLE.items()
    ]
    command = (
        str(model_dir),
        "--engine",
        "vllm",
        "--engine-arg",
        "enforce_eager=true",
        "--prefill",
        "1",
        "--decode",
        "2",
    )
    before = vllm_processes()  # an engine of other tests
    with tempfile.TemporaryDirectory(prefix="vllm-") as name, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", name)
        environment.setenv("PENSTOCK_STATE_DIR", name)
        with served(*command, *flags) as deployment:
            yield Site(deployment, model)
    psutil.wait_procs(left := [each for each in vllm_processes() if each not in before], timeout=20)
    assert not [each for each in left if each.is_running()]


def test_greedy_output_is_that_of_one_model_and_decode_computes_no_prompt(site):
    prompts = [prompt(40 + 35 * seed, 200 + seed) for seed in range(8)]
    answers = [site.tell(ids) for ids in prompts]
    assert answers == [site.expected(ids, TOKENS) for ids in prompts]
    assert site.metric('penstock_router_prefills_total{place="remote"}') == 8
    assert site.loads()["prefill-1"]["generated_tokens"] == 8
    site.until(lambda: site.decoding("generated_tokens") == 8 * TOKENS)
    assert site.decoding("prefilled_tokens") == 0, "vLLM counts the prompts as received"
    assert site.decoding("prefix_hit_tokens") == 0
    assert site.decoding("kv_failures") == 0


def test_prefill_workers_load_what_they_evicted_and_decode_workers_take_what_they_send(site):
    prompts = [prompt(400, 250 + seed) for seed in range(6)]
    expected = [site.expected(ids, 8) for ids in prompts]
    received = site.decoding("prefilled_tokens")
    for _ in range(2):  # six prompts of 13 blocks are more than the device has
        assert [site.tell(ids, 8) for ids in prompts] == expected
    (host,) = site.loads()["prefill-1"]["kv_tiers"]
    assert host["hit_tokens"] >= 4 * 384
    assert (host["missing_blocks"], host["corrupt_blocks"]) == (0, 0)
    assert site.decoding("prefilled_tokens") == received
    assert site.decoding("kv_failures") == 0


def test_a_stream_goes_on_exactly_when_its_decode_worker_is_killed(site):
    ids = prompt(100, 300)
    expected, text, victim = site.expected(ids, LONG_TOKENS), "", None
    for number, piece in enumerate(site.pieces(ids, LONG_TOKENS)):
        text += piece
        if number == 10:
            running = {name: load.get("running_requests") for name, load in site.loads().items()}
            (victim,) = (name for name, count in running.items() if count and name.startswith("decode"))
            site.kill(victim)
    assert victim is not None
    assert text == expected


def test_a_prefill_worker_killed_before_its_kv_is_read_costs_a_prefill(site):
    ids = prompt(200, 400)
    prefilled = site.loads()["prefill-1"]["generated_tokens"]
    failures = site.decoding("kv_failures")
    answers = []
    stopped = [
        site.process(name) for name, load in site.loads().items() if name.startswith("decode") and load
    ]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        asking = threading.Thread(target=lambda: answers.append(site.tell(ids)))
        asking.start()
        site.until(lambda: site.loads()["prefill-1"].get("generated_tokens") == prefilled + 1, timeout_s=4)
        site.kill("prefill-1")
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
    asking.join(timeout=120)
    assert answers == [site.expected(ids, TOKENS)]
    site.until(lambda: site.decoding("kv_failures") == failures + 1)
