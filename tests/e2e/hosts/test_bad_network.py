"""Two hosts whose network is slow and loses frames, or carries them in one direction only: no token is wrong or missing.

The second host's clocks are ahead: by a day since its start, by an hour of the date.
"""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cable import bad_cable
from tests.support.host import TOKENS, Host, text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "curl", "namespaces", "faketime")]
GRAPH = Path(__file__).parents[3] / "examples" / "two_hosts.yaml"
BOTH = {"worker-1@host-a", "worker-1@host-b"}
STREAMS = 4


def skewed():
    """Begin a command so that its processes' monotonic clocks are a day ahead, on kernels that can (5.6), and their date an hour."""
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    date = ("env", f"LD_PRELOAD={library}", "FAKETIME=+3600s", "FAKETIME_DONT_FAKE_MONOTONIC=1")
    words = ("unshare", "--time", "--monotonic", "86400", "--boottime", "86400")
    works = subprocess.run([*words, "true"], check=False, capture_output=True).returncode == 0
    return (*(words if works else ()), *date)


def test_streams_go_on_over_a_bad_network(tmp_path):
    with bad_cable() as laid, ExitStack() as stack:
        first, second = (
            Host(name, tmp_path / f"host-{letter}", stack)
            for name, letter in zip(laid.names, "ab", strict=True)
        )
        second.clock = skewed()
        dates = [
            int(subprocess.run([*clock, "date", "+%s"], check=True, capture_output=True).stdout)
            for clock in ((), second.clock)
        ]
        assert dates[1] - dates[0] >= 3600
        hub = f"tcp://{laid.addresses[0]}:7400"
        settings = [
            "roles.aggregated.engine=mock", "roles.aggregated.mock.speedup=0.5", "supervision.spare_processes=0",
            "request_plane.heartbeat_interval_s=0.5", "request_plane.heartbeat_timeout_s=3",
        ]  # fmt: skip
        flags = [flag for setting in settings for flag in ("--set", setting)]
        first.up(str(GRAPH), "--set", f"runtime.hub={hub}", *flags)
        first.wait(r"^penstock +ready")
        second.up(str(GRAPH), "--join", hub, "--run", "aggregated", *flags)
        second.wait(r"^penstock +ready +no frontend here")
        url = f"http://{laid.addresses[0]}:8000"

        def workers():
            return {worker["name"]: worker for worker in first.get(f"{url}/admin/workers")["workers"]}

        def ready():
            return {name for name, worker in workers().items() if worker["condition"] == "ready"}

        def begin_streams():
            """Begin streams at both workers."""
            streams = [first.stream(url) for _ in range(STREAMS)]

            def all_run():
                running = [(worker["load"] or {}).get("running_requests", 0) for worker in workers().values()]
                return sum(running) == STREAMS and min(running) > 0

            until(all_run)
            return streams

        until(lambda: ready() == BOTH)
        undisturbed = text_of(first.stream(url))
        assert undisturbed[1] == TOKENS

        streams = begin_streams()
        laid.carry(delay_s=0.2, loss=0.01)
        streams += [first.stream(url) for _ in range(STREAMS)]
        assert [text_of(stream) for stream in streams] == [undisturbed] * len(streams)
        laid.carry()
        for silent in (0, 1):
            until(lambda: ready() == BOTH)
            streams = begin_streams()
            laid.carry(cut=silent)
            until(lambda: ready() == {"worker-1@host-a"})
            assert [text_of(stream) for stream in streams] == [undisturbed] * STREAMS
            laid.carry()
        until(lambda: ready() == BOTH)
        assert text_of(first.stream(url)) == undisturbed
        assert "failed" not in " ".join(second.lines), "nobody was started again"
