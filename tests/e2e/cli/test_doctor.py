"""`penstock doctor`, on this machine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.core.errors import TransferError
from penstock.doctor import examination
from penstock.doctor.findings import LOOPBACK, OWN, PROCESS
from penstock.seams import Transport, TransportHost
from penstock.transfer import TransferConfig
from penstock.transfer.transports.memory import MemoryTransport

pytestmark = pytest.mark.slow


def test_it_measures_what_works_and_says_why_the_rest_does_not(tmp_path: Path) -> None:
    out = tmp_path / "findings.json"
    command = [sys.executable, "-m", "penstock", "doctor", "--json", str(out), "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    findings = json.loads(out.read_text())
    engines = {engine["name"]: engine for engine in findings["engines"]}
    assert engines["mock"]["devices"] == ["cpu"]
    assert "engines\nmock    runs on cpu\n" in done.stdout
    measured = [path for path in findings["paths"] if not path.get("refusal")]
    works = {tuple(path[name] for name in ("place", "transport", "local", "remote")) for path in measured}
    assert works >= {
        (OWN, "memory", "dram", "dram"),
        (OWN, "file", "shared", "file"),
        (PROCESS, "shm", "shared", "shared"),
        (LOOPBACK, "tcp", "dram", "shared"),
    }
    for path in measured:
        assert min(path["read_gb_per_s"], path["write_gb_per_s"], path["latency_us"]) > 0
        assert path["transport"] in done.stdout
    for transport in findings["transports"]:
        if not any(name == transport["name"] for _, name, _, _ in works):
            assert f"\n{transport['name']}: " in done.stdout
    assert {"native module", "ptrace_scope"} <= {finding["name"] for finding in findings["host"]}
    assert sorted(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        (
            "--json",
            "/nowhere/x.json",
            "--json: /nowhere/x.json: cannot be written: no such file or directory",
        ),
        ("--json", "/tmp", "--json: /tmp is a directory; expected a file"),
        ("--directory", "/nowhere", "--directory: /nowhere: no such file or directory"),
        ("--jsn", "x", "penstock doctor: unknown flag --jsn; did you mean '--json'?"),
    ],
)
def test_bad_input_is_a_line(capsys: pytest.CaptureFixture[str], flag: str, value: str, said: str) -> None:
    assert main(["doctor", flag, value]) == 2
    assert capsys.readouterr() == ("", f"penstock: {said}\n")


class _Broken(MemoryTransport):
    """Of another make: it cannot work here."""

    name = "broken"

    async def start(self, host: TransportHost) -> None:
        del host
        raise TransferError("it needs a warp drive: install one")


class _Raising(MemoryTransport):
    """It does what no transport may."""

    name = "raising"

    def contact(self) -> bytes:
        raise RuntimeError("can't start new thread")


def test_transports_are_those_that_there_are_and_a_missing_neighbour_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def nobody() -> AsyncIterator[dict[str, bytes]]:
        raise TransferError("another process could not start: no memory")
        yield {}

    def made(config: TransferConfig) -> list[Transport]:
        return [
            kind(threads=config.copies.threads, inline_bytes_max=config.copies.inline_bytes_max)
            for kind in (_Raising, MemoryTransport, _Broken)
        ]

    monkeypatch.setattr(examination, "neighbour", nobody)
    findings = asyncio.run(examination.examine(tmp_path, made))
    assert findings.problems == (
        "another process could not start: no memory",
        "raising: RuntimeError: can't start new thread",
    )
    assert {path.transport for path in findings.paths} == {"memory"}
    memory, broken = findings.transports
    assert (memory.name, broken.name) == ("memory", "broken")
    assert broken.refusals == {OWN: "it needs a warp drive: install one"}
