"""The demo as a newcomer gets it: the packaged model, the paged engine, two workers."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.engine]

QUESTIONS = json.loads((Path(__file__).parents[2] / "data" / "demo_questions.json").read_text())
MODEL = "penstock-demo"


MEMORY_BYTES_MAX = 1_000_000_000
MEMORY_BYTES_MAX_WITH_CUDA = (
    1_600_000_000  # two processes that have loaded the libraries of PyTorch's CUDA build
)
"""What all processes of the demo may take together; docs/quickstart.md says so."""


def memory_bytes_max() -> int:
    """Look for the library rather than import torch, which would cost this process seconds and memory."""
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cuda.so"
    return MEMORY_BYTES_MAX_WITH_CUDA if library.exists() else MEMORY_BYTES_MAX


def memory_bytes(process: psutil.Process) -> int:
    """Memory of a process and its children, what several of them map counted once."""
    rollups = [
        Path(f"/proc/{member.pid}/smaps_rollup").read_text()
        for member in [process, *process.children(recursive=True)]
    ]
    assert len(rollups) >= 4  # the supervisor, two workers, a frontend
    return sum(int(re.search(r"(?m)^Pss: +(\d+) kB$", rollup)[1]) * 1024 for rollup in rollups)


@contextmanager
def demo() -> Iterator[tuple[str, psutil.Process]]:
    """Run the command of `make demo`; give its URL and its process."""
    command = [sys.executable, "-m", "penstock", "serve", "--demo", "--port", "0", "--first-chat"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stdout.readline, "")
            url = next(line.split()[2] for line in lines if re.match("penstock +ready", line))
            assert any("Prometheus" in line for line in lines)  # the last that the first chat says
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_demo_answers_questions_that_it_was_not_trained_on_within_its_memory(runtime_dir):
    with demo() as (url, supervisor):

        async def ask() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

                async def answer(question: str, **options: int) -> str:
                    whole = await client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": question}], **options
                    )
                    return whole.choices[0].message.content

                answers = await asyncio.gather(
                    *(answer(item["question"], max_tokens=300) for item in QUESTIONS)
                )
                long = (answer(f"{n} " + "router " * 3000, max_tokens=8) for n in range(6))
                await asyncio.gather(*long)  # the longest prompts need the most room beside their KV
                return answers

        answers = asyncio.run(ask())
        taken = memory_bytes(supervisor)
        print(f"the demo takes {taken / 1e6:.0f} MB")
        assert taken < memory_bytes_max()
    missed = [
        f"{item['question']}\n  {text}"
        for item, text in zip(QUESTIONS, answers, strict=True)
        if not any(phrase.lower() in text.lower() for phrase in item["expected"])
    ]
    assert len(QUESTIONS) == 20
    assert len(missed) <= 4, "\n".join(missed)
