"""`penstock doctor`, on this machine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.core.errors import TransferError
from penstock.doctor import examination
from penstock.doctor.findings import LOOPBACK, OWN, PROCESS
from penstock.seams import Transport, TransportHost
from penstock.transfer import TransferConfig
from penstock.transfer.transports.memory import MemoryTransport

pytestmark = pytest.mark.slow


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_measures_what_works_and_says_why_the_rest_does_not(tmp_path: Path) -> None:
    out = tmp_path / "findings.json"
    done = doctor("--json", str(out), "--directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    findings = json.loads(out.read_text())
    engines = {engine["name"]: engine for engine in findings["engines"]}
    assert engines["mock"]["devices"] == ["cpu"]
    assert "engines\nmock    runs on cpu\n" in done.stdout
    works = {
        (path["place"], path["transport"], path["local"], path["remote"])
        for path in findings["paths"]
        if not path.get("refusal")
    }
    assert (OWN, "memory", "dram", "dram") in works
    assert (OWN, "file", "shared", "file") in works
    assert (PROCESS, "shm", "shared", "shared") in works
    assert (LOOPBACK, "tcp", "dram", "shared") in works
    for path in findings["paths"]:
        if not path.get("refusal"):
            assert min(path["read_gb_per_s"], path["write_gb_per_s"], path["latency_us"]) > 0
            assert path["transport"] in done.stdout
    for transport in findings["transports"]:
        if not any(name == transport["name"] for _, name, _, _ in works):
            assert f"\n{transport['name']}: " in done.stdout
    assert {"native module", "ptrace_scope"} <= {finding["name"] for finding in findings["host"]}
    assert sorted(tmp_path.iterdir()) == [out]


def test_bad_input_is_a_line(tmp_path: Path) -> None:
    for arguments, text in (
        (
            ("--json", "/nowhere/x.json"),
            "--json: /nowhere/x.json: cannot be written: no such file or directory",
        ),
        (("--json", str(tmp_path)), f"--json: {tmp_path} is a directory; expected a file"),
        (("--directory", "/nowhere"), "--directory: /nowhere: no such file or directory"),
        (("--jsn", "x"), "penstock doctor: unknown flag --jsn; did you mean '--json'?"),
    ):
        done = doctor(*arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"penstock: {text}\n")


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
