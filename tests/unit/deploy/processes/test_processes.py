"""What processes of a deployment are called, what they say of themselves, and what they import."""

import asyncio
import socket
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.load import WorkerLoad
from penstock.deploy.messages import Drain, Failed, ProcessHeartbeat, Report, StartPhase, cause_of, report_of
from penstock.deploy.processes.control import Control
from penstock.deploy.processes.frontend_process import tracing
from penstock.deploy.processes.worker_process import pulse
from penstock.runtime import spans
from penstock.runtime.config import TracingConfig


def test_a_group_of_errors_has_the_cause_that_is_clear():
    unclear, clear = ValueError("x"), ConfigError("no weights")
    nested = ExceptionGroup("h", [clear, Unavailable("later")])
    assert cause_of(unclear) is cause_of(ExceptionGroup("g", [ExceptionGroup("h", [unclear])])) is unclear
    assert cause_of(ExceptionGroup("g", [unclear, nested])) is clear
    several = ExceptionGroup("g", [unclear, KeyError("y")])
    assert cause_of(several) is several


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (ExceptionGroup("g", [ConfigError("no weights")]), Failed(message="no weights", config=True)),
        (Unavailable("later"), Failed(message="later", outside=True)),
        (KeyError("x"), Failed(message="KeyError: 'x'")),
    ],
)
def test_a_report_says_whether_a_restart_may_help(error, report):
    assert report_of(error) == report


async def test_a_supervisor_that_does_not_read_stops_no_process_and_reads_all_later():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        control = Control(theirs)
        ours.sendall(msgspec.json.encode(Drain(timeout_s=2.0)) + b"\n")
        told = [StartPhase(what=str(number) * 40_000) for number in range(10)]
        heard = asyncio.Event()
        control.listen(gone=heard.set)
        control.on_drain = lambda _timeout_s: heard.set()
        for report in told:
            control.tell(report)  # returns although nothing reads
        await heard.wait()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        for report in told:
            assert msgspec.json.decode(await reader.readline(), type=Report) == report
        writer.close()
        control.tell(told[0])  # nobody hears it, and that is no error
        asyncio.get_running_loop().remove_reader(theirs)


@pytest.mark.parametrize(
    ("load", "beat"),
    [
        (WorkerLoad(steps=3), ProcessHeartbeat(steps=3)),
        (WorkerLoad(steps=3, running_requests=1), ProcessHeartbeat(steps=3, has_requests=True)),
        (WorkerLoad(steps=3, waiting_requests=1), ProcessHeartbeat(steps=3, has_requests=True)),
    ],
)
def test_a_heartbeat_says_how_far_the_engine_is(load, beat):
    assert pulse(SimpleNamespace(load=lambda: load)) == beat


def test_traces_without_the_extra_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)

    async def main():
        async with tracing(TracingConfig(), "service", "process"):
            pass

    with pytest.raises(ConfigError, match=r"pip install 'penstock-llm\[otel\]'"):
        asyncio.run(main())
    assert not spans.is_recording()


@pytest.mark.slow
def test_without_the_setting_no_module_of_opentelemetry_is_imported():
    script = (
        "import asyncio, sys\n"
        "from penstock.deploy.processes import frontend_process, worker_process\n"
        "from penstock.deploy.processes.frontend_process import tracing\n"
        "async def main():\n"
        "    async with tracing(None, 's', 'p'): pass\n"
        "asyncio.run(main())\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
