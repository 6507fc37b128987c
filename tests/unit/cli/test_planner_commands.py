"""`penstock planner` on the log of a planner that scaled a deployment in memory, and the metrics of the same rounds."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from penstock.cli import main
from penstock.cli import planner as log_command
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.planning import make_planning
from penstock.graph import Graph
from penstock.planner.decision_log import LoggedRound
from penstock.planner.memory_connector import MemoryConnector, TimedChanges
from penstock.planner.observation import ObservationStream
from penstock.runtime.observations import RequestWindow, WorkerWindow
from penstock.sim.loop import run_virtual
from tests.support.planner_world import digest

ROOT = Path(__file__).parents[3]
GRAPH = {
    "model": "demo",
    "roles": {"aggregated": {"engine": "mock", "max_running_requests": 16}},
    "slo": {"ttft_s": 0.5, "itl_s": 0.02},
    "planner": {"max_workers": 4, "cool_down_s": 60.0, "cold_s": 1.0, "floor_period_s": 20.0},
}


def record(path, **planner):
    """Run a planner for five minutes, with demand in the second and third; returns what a frontend was told."""
    told, said = [], []

    async def main():
        graph = Graph.model_validate(GRAPH | {"planner": GRAPH["planner"] | planner})
        connector = MemoryConnector({Role.AGGREGATED: 1}, changes=TimedChanges(starts_s=5))
        stream = ObservationStream()
        planning = make_planning(
            graph,
            graph.roles.present(),
            connector,
            stream,
            model_dir=ROOT / "src/penstock/demo/model",
            log_path=path,
            say=lambda *words: said.append(words),
            tell=told.append,
        )
        with planning:
            async with asyncio.TaskGroup() as group:
                rounds = group.create_task(planning.run())
                for second in range(300):
                    await asyncio.sleep(1.0)
                    count = 60 if 60 <= second < 180 else 1
                    stream.put(
                        "frontend-1",
                        RequestWindow(
                            seconds=1.0,
                            arrivals=count,
                            finished=count,
                            input_tokens=digest(200, count),
                            output_tokens=digest(50, count),
                            ttft_s=digest(0.05, count),
                            itl_s=digest(0.01, count),
                        ),
                    )
                    for worker in (await connector.scale()).replicas:
                        stream.put(
                            worker.name, WorkerWindow(seconds=1.0, role=worker.role, ready_s=worker.age_s)
                        )
                rounds.cancel()

    run_virtual(main())
    return told, said


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "planner.jsonl"
    return path, *record(path)


def run(capsys, *arguments):
    code = main(["planner", *map(str, arguments)])
    done = capsys.readouterr()
    return code, done.out, done.err


def test_the_log_lists_the_last_rounds(rounds, capsys):
    path, _, said = rounds
    code, out, _ = run(capsys, "log", "--file", path)
    assert code == 0
    lines = [line for line in out.splitlines() if "more came to the same" not in line]
    assert len(lines) == 20
    assert len(out.splitlines()) > 20, "rounds that came to the same are counted"
    _, everything, _ = run(capsys, "log", "--file", path, "-n", "9" * 30)
    changed = [line for line in everything.splitlines() if "  changed  " in line]
    assert any("aggregated more: aggregated 1 -> " in line for line in changed)
    assert any("retires" in line for line in changed)
    assert len(changed) == sum(words[1] == "scales" for words in said)
    _, as_json, _ = run(capsys, "log", "--file", path, "-n", "3", "--json")
    assert [json.loads(line)["type"] for line in as_json.splitlines()] == ["round"] * 3


def test_a_log_is_followed_also_once_the_clock_is_set_back(rounds, tmp_path, capsys, monkeypatch):
    path = tmp_path / "planner.jsonl"
    path.write_bytes(rounds[0].read_bytes())
    last = msgspec.json.decode(path.read_bytes().splitlines()[-1], type=LoggedRound)
    earlier = msgspec.structs.replace(last, time_s=last.time_s - 3600, like_before=0)
    lines = [msgspec.json.encode(earlier) + b"\n", b""]

    def sleep(_seconds):
        if not lines:
            raise KeyboardInterrupt
        with path.open("ab") as log:
            log.write(lines.pop(0))

    monkeypatch.setattr(log_command.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        log_command.show_log(path, last=1, follow=True, as_json=True)
    shown = [msgspec.json.decode(line, type=LoggedRound) for line in capsys.readouterr().out.splitlines()]
    assert shown == [last, earlier]


def test_why_explains_a_round(rounds, capsys):
    path, *_ = rounds
    code, out, _ = run(capsys, "why", "--file", path)
    assert code == 0
    assert "retires worker" in out or "retires aggregated" in out
    for label in ("did", "decided", "not fewer:", "for ", "expected", "saw", "workers"):
        assert label in out
    number = int(out.split()[1])
    assert run(capsys, "why", number, "--file", path)[1] == out
    assert run(capsys, "why", "aggregated", "--file", path)[1] == out
    assert json.loads(run(capsys, "why", number, "--file", path, "--json")[1])["record"]["number"] == number
    assert run(capsys, "why", 2, "--file", path)[1].startswith("round ")
    assert run(capsys, "why", out.split()[4].rstrip(":"), "--file", path)[0] == 0, "by its time"


def test_a_replay_is_equal_until_settings_differ(rounds, capsys):
    path, *_ = rounds
    code, out, _ = run(capsys, "replay", path)
    assert code == 0
    assert ": " in out
    assert " the same, 0 not" in out
    code, out, _ = run(capsys, "replay", path, "--max-workers", "1")
    assert code == 0
    assert "aggregated 1 instead of" in out
    assert "worker-hours aimed at" in out
    differing = run(capsys, "replay", path, "--max-workers", "1", "--json")[1].splitlines()
    assert all(json.loads(line)["target"]["aggregated"] <= 1 for line in differing)
    assert run(capsys, "replay", path, "--set", "planner.cool_down_s=600", "--slo-itl", "0.03")[0] == 0


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("why 99999 --file {log}", "there is no round 99999; the log has 1 to "),
        ("why aggregatd --file {log}", "did you mean 'aggregated'?"),
        ("why 2001-01-01T12:00 --file {log}", "no round before 2001-01-01T12:00; the log begins at"),
        ("why 25:00 --file {log}", "25:00: no time"),
        ("why prefill --file {log}", "there is no role prefill; the roles are aggregated"),
        ("replay nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("replay {readme}", "no line of a planner's log"),
        ("log -n 0", "-n: must be >= 1"),
        ("replay {log} --slo-itl -1", "--slo-itl"),
        ("replay {log} --max-workers 0", "--max-workers"),
        ("replay {log} --set planner.cool_down=1", "cool_down_s"),
    ],
)
def test_bad_input_is_refused_in_a_line(rounds, capsys, command, why):
    words = [word.format(log=rounds[0], readme=ROOT / "README.md") for word in command.split()]
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert why in err


def test_a_dry_run_records_and_changes_nothing(tmp_path, capsys):
    path = tmp_path / "planner.jsonl"
    told, said = record(path, act={"dry_run": True})
    assert {planned.have[Role.AGGREGATED] for planned in told} == {1}
    assert any(planned.outcome == "dry_run" for planned in told)
    assert all(not planned.changes for planned in told)
    assert any(words[1] == "would" for words in said)
    assert "(dry run: not done)" in run(capsys, "why", "--file", path)[1]
