"""The two sides: `penstock serve` with mock workers, and Dynamo's frontend with its mocker; neither needs a service."""

import contextlib
import json
import os
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.processes.served import served
from penstock.core.errors import Unavailable

_START_S_MAX = 60.0
_STOP_S_MAX = 10.0
_BATCH = {"max_running_requests": 256, "max_batch_tokens": 8192}
"""Limits of a worker's batch: what Dynamo's mocker has by default."""
_FREE_PREFILL = (
    "mock.timing.prefill_s_per_token=0",
    "mock.timing.prefill_s_per_token2=0",
    "mock.timing.decode_s_per_context_token=0",
)


@dataclass(frozen=True, slots=True)
class Server:
    """A frontend process, where it listens, and the model's name."""

    name: str
    port: int
    model: str
    pid: int


@contextlib.contextmanager
def ours(
    model: Path, *, speedup: float = 1e6, frontends: int = 1, free_prefill: bool = False
) -> Iterator[Server]:
    """Serve with two mock workers; `speedup` divides their step of 3.5 ms. `pid` is the first frontend's.

    With `free_prefill` a step takes 65,536 prompt tokens and is no longer for them.
    """
    flags = [
        "--engine",
        "mock",
        "--mock-speedup",
        str(speedup),
        "--workers",
        "2",
        "--frontend-processes",
        str(frontends),
    ]
    batch = _BATCH | ({"max_batch_tokens": 65_536} if free_prefill else {})
    settings = [f"{name}={value}" for name, value in batch.items()]
    for setting in (*settings, *(_FREE_PREFILL if free_prefill else ())):
        flags += ["--set", f"roles.aggregated.{setting}"]
    with served(str(model), *flags) as deployment:
        children = Path(f"/proc/{deployment.pid}/task/{deployment.pid}/children").read_text().split()
        (pid,) = (
            int(child)
            for child in children
            if Path(f"/proc/{child}/comm").read_text().strip() == "frontend-1"
        )
        yield Server("ours", int(deployment.url.rpartition(":")[2]), deployment.model, pid)


@contextlib.contextmanager
def peer(python: Path, model: Path, directory: Path, *, speedup: float) -> Iterator[Sequence[Server]]:
    """Serve the same with Dynamo, by the Python that has it; nothing where it is not installed.

    Its defaults but: discovery by files, every socket on the loopback, the KV router, and warnings alone in the log.
    """
    if not python.exists():
        yield ()
        return
    port = _free_port()
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    environment = os.environ | dict.fromkeys(hosts, "127.0.0.1") | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(directory / f"discovery-{port}"),
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    mocker = ["dynamo.mocker", "--model-path", str(model), "--model-name", "bench", "--num-workers", "2"]
    mocker += ["--speedup-ratio", str(speedup), "--block-size", "16", "--num-gpu-blocks-override", "65536"]
    frontend = [
        "dynamo.frontend",
        "--router-mode",
        "kv",
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(port),
    ]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((directory / "peer.log").open("wb"))
        pids = []
        for module in (mocker, frontend):
            process = subprocess.Popen([str(python), "-m", *module], env=environment, stdout=log, stderr=log)
            stack.callback(_stop, process)
            pids.append(process.pid)
        _wait_for_model(port, directory / "peer.log")
        yield [Server("peer", port, "bench", pids[-1])]


def _wait_for_model(port: int, log: Path) -> None:
    until_s = time.monotonic() + _START_S_MAX
    while time.monotonic() < until_s:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer,
        ):
            if b'"bench"' in answer.read():
                return
        time.sleep(0.2)
    raise Unavailable(
        f"the peer lists no model after {_START_S_MAX:g} s: {log.read_text(errors='replace')[-500:]}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Give the CPU seconds of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / 1e6


def anonymous_mb(pid: int) -> float:
    """Give its resident memory without pages of files, which the kernel takes away and reads again as it likes."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024 / 1e6


def idle_cpu_share(pid: int, seconds: float) -> float:
    """Give the share of a core that it uses for so long."""
    before_s, began_s = cpu_s(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(pid) - before_s) / (time.perf_counter() - began_s)


def machine_idle_s() -> float:
    """Give the seconds that all cores together have been idle so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / _TICKS_PER_S


_FILES_MAX = 100
_VOCABULARY = 16_000
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "head_dim": 64,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_model(directory: Path) -> Path:
    """Write the model's files; takes a few seconds."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES_MAX]
    tokenizer.train([str(file) for file in files], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    files_of_json = {
        "config.json": _SHAPE | {"vocab_size": tokenizer.get_vocab_size()},
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": [1]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[0],
            "eos_token": _SPECIAL[1],
            "model_max_length": 131_072,
            "chat_template": _TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files_of_json.items():
        (directory / name).write_text(json.dumps(content))
    return directory
