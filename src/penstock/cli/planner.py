"""`penstock planner replay`: decides the rounds of a log again."""

import argparse
import asyncio
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from penstock import __version__
from penstock.cli.logs import LogFollower
from penstock.cli.parser import Parser, add_deployment, add_set
from penstock.core.clock import wall_time_s
from penstock.core.config import nearest
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import find_deployment
from penstock.deploy.state import PLANNER_LOG, state_dir
from penstock.graph import Graph, Overrides, Slo, build
from penstock.graph.capacities import make_capacity
from penstock.planner.config import PlannerConfig
from penstock.planner.decider import ScalingDecision
from penstock.planner.decision_log import Entry, LoggedRound, LoggedRun, decode, read_entries
from penstock.planner.demand import SloTargets
from penstock.planner.policy import Policy
from penstock.planner.record import DecisionRecord, Expected, SeenDeployment, SeenRole
from penstock.planner.replay import LogReplay, ReplayedRound

_LAST = 20
_OTHER = {
    "--slo-ttft": ("slo.ttft_s", "S", "another target of TTFT, in seconds"),
    "--slo-itl": ("slo.itl_s", "S", "another target of ITL, in seconds"),
    "--min-workers": ("planner.min_workers", "N", "other fewest workers of each role"),
    "--max-workers": ("planner.max_workers", "N", "other most workers of each role"),
}
"""Flag: (path in the graph, placeholder, help)."""


def add_planner(parser: Parser) -> None:
    """Add the arguments of `penstock planner`."""
    parser.description = (
        "Show what the planner of a running deployment decided and why, or decide recorded rounds again. See"
        " docs/planner.md."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    log = actions.add_parser(
        "log", help="list the last rounds", description="List the last rounds of the planner, one a line."
    )
    log.add_argument("-n", type=int, default=_LAST, metavar="N", help=f"how many (default {_LAST})")
    log.add_argument("--follow", action="store_true", help="go on with those that come, until Ctrl-C")
    log.set_defaults(run=_run_log)
    why = actions.add_parser(
        "why",
        help="explain one round",
        description="Explain one round of the planner: what it saw, expected, decided and did, and why not with fewer workers.",
    )
    why.add_argument(
        "which",
        nargs="?",
        metavar="ROLE|TIME|NUMBER",
        help="a role: its last change; a time such as 14:05: the last round then; a round's number (default: the last change)",
    )
    why.set_defaults(run=_run_why)
    for each in (log, why):
        each.add_argument("--file", type=Path, metavar="FILE", help="read a log instead, planner.jsonl")
        add_deployment(each, has_url=True)
        each.add_argument("--json", action="store_true", help="print the log's lines unchanged")
    again = actions.add_parser(
        "replay",
        help="decide the rounds of a log again",
        description="Decide the rounds of a log again, by this version and with other settings where given, and show the"
        " differences. What the rounds saw stays as it was.",
        epilog="Exit code without other settings, for a log of this version: 1 if a round differs.",
    )
    again.add_argument("file", type=Path, metavar="FILE", help="a deployment's planner.jsonl")
    for flag, (place, metavar, text) in _OTHER.items():
        again.add_argument(flag, dest=place, metavar=metavar, help=text)
    add_set(again, "another value of any field of the graph, as planner.cool_down_s=60")
    again.add_argument("--json", action="store_true", help="print each round that differs as JSON")
    again.set_defaults(run=_run_replay)


def _run_log(options: argparse.Namespace) -> int:

    if options.n < 1:
        raise ConfigError(f"-n: must be >= 1, got {options.n}")
    path = find_log(name=options.name, url=options.url, part=options.part, file=options.file)
    show_log(path, last=options.n, follow=options.follow, as_json=options.json)
    return 0


def _run_why(options: argparse.Namespace) -> int:

    path = find_log(name=options.name, url=options.url, part=options.part, file=options.file)
    show_why(path, options.which, as_json=options.json)
    return 0


def _run_replay(options: argparse.Namespace) -> int:

    overrides = Overrides(options.set)
    for flag, (place, _, _) in _OTHER.items():
        if (value := getattr(options, place)) is not None:
            overrides.assign(place, value, flag=flag)
    return replay(options.file, overrides, as_json=options.json)


_OUTCOMES = {
    "blind": "nothing was known",
    "held": "held still",
    "refused": "some changes were refused",
    "dry_run": "would have changed workers",
    "changed": "changed workers",
    "kept": "kept the workers",
}


def clock(time_s: float, *, with_date: bool = False) -> str:
    """Format a time of this machine's zone."""
    local = datetime.fromtimestamp(time_s, tz=UTC).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S")


def line(entry: LoggedRound) -> str:
    """Format a round in one line."""
    return f"{clock(entry.time_s)}  {entry.record.number:>5}  {entry.record.outcome:<7}  {entry.record.explain()}"


def folded(entry: LoggedRound) -> str:
    """Say how many rounds before this one are not in the log; empty if none."""
    if not entry.like_before:
        return ""
    rounds = "1 round" if entry.like_before == 1 else f"{entry.like_before} rounds"
    return f"{'':8}  {'':>5}  {rounds} more came to the same"


def paragraphs(entry: LoggedRound, role: Role | None = None) -> Iterator[str]:
    """Format all that is known of a round, or of one role in it."""
    record = entry.record
    yield f"round {record.number} at {clock(entry.time_s, with_date=True)}: {_OUTCOMES[record.outcome]}"
    yield from _labelled("did", _did(record))
    if record.held:
        yield from _labelled("held", [record.held])
    yield from _labelled("refused", list(record.refused))
    yield from _labelled("damping", list(record.damped))
    if record.overdue:
        yield from _labelled("overdue", record.late_starts)
    yield from _labelled("waits", list(record.waits))
    if record.decision is not None:
        yield from _labelled("decided", _decided(record, record.decision, role))
        yield from _labelled("for", [_asked(record.decision)])
    yield from _labelled("expected", [_expected(each) for each in record.expected])
    yield from _labelled("saw", [_seen(record.seen, record.decision)])
    yield from _labelled(
        "workers", [_workers(seen) for seen in record.seen.roles if role is None or seen.role is role]
    )


def _labelled(label: str, lines: list[str]) -> Iterator[str]:
    for number, text in enumerate(lines):
        yield f"  {'' if number else label:<9} {text}"


def _did(record: DecisionRecord) -> list[str]:
    changes = [f"{name} becomes {role}" for name, role in record.flips]
    changes += [
        f"starts {count} {role} {'worker' if count == 1 else 'workers'}"
        for role, count in record.adds.items()
    ]
    changes += [f"retires {name}" for name in record.retires]
    said = [", ".join(changes) or "nothing"]
    if record.is_dry and changes:
        said[0] += " (dry run: not done)"
    if record.late:
        said.append(f"retires or flips {', '.join(record.late)} once others are ready")
    return said


def _decided(record: DecisionRecord, decision: ScalingDecision, role: Role | None) -> list[str]:
    said = []
    for term in decision.terms:
        if role is not None and term.role is not role:
            continue
        aim = record.target.get(term.role, term.choice)
        damped = "" if aim == term.choice else f", {aim} after damping"
        said.append(
            f"{term.role}: {term.now} -> {term.choice}{damped}; the forecast needs {term.floor}, queue and latencies"
            f" {term.reaction}, scale-in stops at {term.keep}"
        )
        said.append(f"  not fewer: {term.why_not_fewer.removeprefix(f'{term.role}: ')}")
    said += [
        f"{other}: {record.now.get(other, 0)} -> {count}; decided was the other kind of deployment"
        for other, count in record.target.items()
        if other not in decision.target and (role is None or other is role)
    ]
    if decision.shortfall:
        said.append(f"the SLO is out of reach: {decision.shortfall}")
    return said


def _asked(decision: ScalingDecision) -> str:
    expected, slo = decision.expected, decision.slo
    late = [
        f"{name} {value * 1e3:.1f} ms now"
        for name, value in (
            ("TTFT", expected.ttft_s),
            ("TTFT at decode workers", expected.decode_ttft_s),
            ("ITL", expected.itl_s),
        )
        if value is not None
    ]
    return (
        f"{expected.rate_per_s:.2f} requests/s of {expected.input_tokens} input tokens, {expected.cached_share:.0%} cached,"
        f" and {expected.output_tokens} output tokens, {expected.queued} queued{''.join(f', {each}' for each in late)};"
        f" TTFT {slo.ttft_s * 1e3:g} ms and ITL {slo.itl_s * 1e3:g} ms of {slo.percentile:g} % of requests"
    )


def _expected(each: Expected) -> str:
    error = "" if each.mean_error is None else f", off by {each.mean_error:.3g} on average"
    cold = ", too few values yet" if each.is_cold else ""
    return f"{each.series} {each.mean:.4g}, {each.low:.4g} to {each.high:.4g} ({each.method}{error}{cold})"


def _seen(seen: SeenDeployment, decision: ScalingDecision | None) -> str:
    parts = [f"{seen.arrivals_per_s:.2f} requests/s in {seen.seconds:.0f} s"]
    percentile = "" if decision is None else f" p{decision.slo.percentile:g}"
    latencies = (("TTFT", seen.ttft_s), ("TTFT at decode workers", seen.decode_ttft_s), ("ITL", seen.itl_s))
    for name, value in latencies:
        if value is not None:
            parts.append(f"{name}{percentile} {value * 1e3:.1f} ms")
    if seen.failed_per_s:
        parts.append(f"{seen.failed_per_s:.2f} failed/s")
    oldest = f", the oldest for {seen.oldest_queued_s:.1f} s" if seen.queued else ""
    parts.append(f"{seen.queued} queued{oldest}")
    if seen.silent:
        parts.append(f"silent: {', '.join(seen.silent)}")
    return ", ".join(parts)


def _workers(seen: SeenRole) -> str:
    cold = f" ({seen.cold} ready for a short time)" if seen.cold else ""
    steps = "" if seen.step_s is None else f", steps of {seen.step_s * 1e3:.1f} ms"
    factor = "" if seen.factor == 1 else f", {seen.factor:.2f} times as long as predicted"
    gpus = ""
    if seen.gpu_watts is not None and seen.gpu_utilization is not None:
        gpus = f", GPUs at {seen.gpu_watts:,.0f} W and {seen.gpu_utilization:.0%}"
    return (
        f"{seen.role}: {seen.workers} seen{cold}, {seen.running} running, {seen.waiting} waiting, KV"
        f" {seen.kv_usage:.0%}{steps}{factor}{gpus}"
    )


_POLL_S = 0.2
_RACING = 64
"""More rounds than are written between a follower's beginning and the end of the first reading."""
_TIME = re.compile(r"(?:(\d{4}-\d{2}-\d{2})[T ])?(\d{1,2}):(\d{2})(?::(\d{2}))?")


def find_log(*, name: str | None, url: str | None, part: str | None, file: Path | None) -> Path:
    """Give the file; else that of the running deployment, or of the one called `name` that has ended.

    Raises:
        Unavailable: no deployment runs, or none fits.
        ConfigError: it has no planner, or several run.
    """
    if file is not None:
        return file
    try:
        connector = asyncio.run(find_deployment(name=name, url=url, part=part))
    except Unavailable:
        if (
            name is not None
            and url is None
            and part is None
            and (kept := state_dir(name) / PLANNER_LOG).exists()
        ):
            return kept
        raise
    deployment = connector.deployment
    assert deployment is not None, "it has answered"
    if not deployment.planner_log:
        raise ConfigError(
            f"{deployment.name} at {deployment.url} has no planner; start it with --max-workers N, or planner: in its graph"
        )
    return Path(deployment.planner_log)


def show_log(path: Path, *, last: int, follow: bool, as_json: bool) -> None:
    """Print the last rounds of a log, and with `follow` those that come.

    Raises:
        ConfigError: the file cannot be read, or is no log.
    """
    with ExitStack() as stack:
        follower = stack.enter_context(closing(LogFollower(path, at_end=True))) if follow else None
        found = deque(_rounds(read_entries(path)), maxlen=min(max(last, _RACING), sys.maxsize))
        entries = list(found)[-last:]
        _print(_lines(entries, as_json=as_json))
        if follower is None:
            if not entries:
                sys.stderr.write(f"penstock: {path}: no rounds yet\n")
            return
        seen = {(entry.time_s, entry.record.number) for entry in found}  # no order: a clock may be set back
        while True:
            came = (
                entry for text in follower.lines() if (entry := decode(text.encode() + b"\n")) is not None
            )
            new = [entry for entry in _rounds(came) if (entry.time_s, entry.record.number) not in seen]
            _print(_lines(new, as_json=as_json))
            time.sleep(_POLL_S)


def show_why(path: Path, which: str | None, *, as_json: bool) -> None:
    """Print all about one round.

    Args:
        path: the log.
        which: a round's number, a time, or a role, whose last change is meant; None is the last change of any role.
        as_json: print the log's line.

    Raises:
        ConfigError: `which` is none of them, or is not in the log.
    """
    rounds = list(_rounds(read_entries(path)))
    if not rounds:
        raise ConfigError(f"{path}: no rounds yet")
    role = Role(which) if which in {role.value for role in Role} else None
    entry = _find(rounds, which, role, path)
    if as_json:
        _print([msgspec.json.encode(entry).decode()])
        return
    _print(paragraphs(entry, role))


def _find(rounds: list[LoggedRound], which: str | None, role: Role | None, path: Path) -> LoggedRound:
    if which is None or role is not None:
        changed = [entry for entry in rounds if _changes(entry, role)]
        known = {each for entry in rounds for each in entry.record.now}
        if role is not None and role not in known:
            raise ConfigError(f"{path}: there is no role {role}; the roles are {', '.join(sorted(known))}")
        return (changed or rounds)[-1]
    if which.isascii() and which.isdecimal():
        return _by_number(rounds, int(which), path)
    if found := _TIME.fullmatch(which):
        return _by_time(rounds, found, which, path)
    roles = [each.value for each in Role]
    raise ConfigError(
        f"{which!r} is no round's number, no time such as 14:05 and no role{nearest(which, roles)}"
    )


def _changes(entry: LoggedRound, role: Role | None) -> bool:
    record = entry.record
    if role is None:
        return record.is_change
    wanted = record.target.get(role)
    return record.is_change and wanted is not None and wanted != record.now.get(role)


def _by_number(rounds: list[LoggedRound], number: int, path: Path) -> LoggedRound:
    """Give the latest round of this number, or the one that it came to the same as."""
    before: LoggedRound | None = None
    found = None
    for entry in rounds:
        if entry.record.number == number:
            found = entry
        elif before is not None and before.record.number < number < entry.record.number:
            found = before
        before = entry
    if found is None:
        first, last = rounds[0].record.number, rounds[-1].record.number
        raise ConfigError(f"{path}: there is no round {number}; the log has {first} to {last}")
    return found


def _by_time(rounds: list[LoggedRound], found: re.Match[str], which: str, path: Path) -> LoggedRound:
    """Give the last round before a time; without a date, of the last 24 hours."""
    date, hour, minute, second = found.groups()
    now = datetime.fromtimestamp(wall_time_s(), tz=UTC).astimezone()
    try:
        day = now if date is None else datetime.fromisoformat(date)
        meant = now.replace(
            year=day.year,
            month=day.month,
            day=day.day,
            hour=int(hour),
            minute=int(minute),
            second=int(second) if second else 59,
            microsecond=999_999,
        )
    except ValueError as error:
        raise ConfigError(f"{which}: no time: {error}") from error
    if date is None and meant > now + timedelta(minutes=1):
        meant -= timedelta(days=1)
    before = [entry for entry in rounds if entry.time_s <= meant.timestamp()]
    if not before:
        raise ConfigError(
            f"{path}: no round before {which}; the log begins at {clock(rounds[0].time_s, with_date=True)}"
        )
    return before[-1]


def _rounds(entries: Iterable[Entry]) -> Iterator[LoggedRound]:
    return (entry for entry in entries if isinstance(entry, LoggedRound))


def _lines(entries: Iterable[LoggedRound], *, as_json: bool) -> Iterator[str]:
    for entry in entries:
        if as_json:
            yield msgspec.json.encode(entry).decode()
            continue
        if before := folded(entry):
            yield before
        yield line(entry)


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{text}\n" for text in lines))
    sys.stdout.flush()


EXIT_DIFFERS = 1
_SHOWN = 20


def replay(path: Path, overrides: Overrides, *, as_json: bool) -> int:
    """Print the rounds that are decided differently now; returns the exit code.

    Args:
        path: the log.
        overrides: settings of the graph that are other than recorded.
        as_json: print each of these rounds as JSON.

    Raises:
        ConfigError: the file is no log, or the settings do not fit.
    """
    graphs: dict[float, Graph] = {}

    def graph_of(run: LoggedRun) -> Graph:
        if run.time_s not in graphs:
            if not run.graph:
                raise ConfigError(f"{path}: has no graph, so that nothing is known of the workers")
            graphs.clear()
            graphs[run.time_s] = build(run.graph, overrides, source=str(path))
        return graphs[run.time_s]

    again = LogReplay(
        lambda run: _policy(graph_of(run), Path(run.model_dir)),
        cool_down_s=lambda run: _settings(graph_of(run)).cool_down_s,
    )
    versions: set[str] = set()
    total, differing = 0, list[ReplayedRound]()

    def entries() -> Iterator[Entry]:
        for entry in read_entries(path):
            if isinstance(entry, LoggedRun):
                versions.add(entry.version)
            yield entry

    for replayed in again.run(entries()):
        total += 1
        if replayed.differs:
            differing.append(replayed)
    if not total:
        raise ConfigError(f"{path}: no round that decided something")
    if as_json:
        lines = [_json(each) for each in differing]
    else:
        lines = [*_differences(differing), *_summary(total, len(differing), again, versions)]
    sys.stdout.write("".join(f"{text}\n" for text in lines))
    is_other = bool(overrides.assigned()) or versions != {__version__}
    return EXIT_DIFFERS if differing and not is_other else 0


def _settings(graph: Graph) -> PlannerConfig:
    return graph.planner or PlannerConfig()


def _policy(graph: Graph, model_dir: Path) -> Policy:
    config, slo = _settings(graph), graph.slo or Slo()
    capacities = [
        make_capacity(role, spec, model_dir=model_dir, block_size=graph.block_size, budget=config.budget)
        for role, spec in graph.roles.present().items()
    ]
    targets = SloTargets(ttft_s=slo.ttft_s, itl_s=slo.itl_s, percentile=slo.percentile)
    return Policy(config, targets, capacities)


def _json(each: ReplayedRound) -> str:
    record = each.round.record
    fields = {
        "number": record.number,
        "time_s": each.round.time_s,
        "now": record.now,
        "recorded": record.target,
        "target": each.target,
        "why": each.why,
    }
    return msgspec.json.encode(fields).decode()


def _differences(differing: Sequence[ReplayedRound]) -> Iterator[str]:
    for each in differing[:_SHOWN]:
        record = each.round.record
        roles = [role for role in each.target if each.target[role] != record.target.get(role)]
        if roles:
            counts = ", ".join(
                f"{role} {each.target[role]} instead of {record.target.get(role, 0)}" for role in roles
            )
        else:
            counts = "decided differently, the same after damping"
        yield f"{clock(each.round.time_s)}  {record.number:>5}  {counts}: {each.why}"
    if len(differing) > _SHOWN:
        yield f"and {len(differing) - _SHOWN} more rounds"


def _summary(total: int, differing: int, again: LogReplay, versions: set[str]) -> Iterator[str]:
    skipped = f", {again.skipped} without a decision" if again.skipped else ""
    by = ", ".join(sorted(versions))
    yield f"{total} rounds of penstock {by}: {total - differing} the same, {differing} not{skipped}"
    for role in sorted(again.recorded_s):
        yield f"{role}: {_hours(again.recorded_s, role)} worker-hours aimed at, {_hours(again.replayed_s, role)} now"


def _hours(seconds: dict[Role, float], role: Role) -> str:
    return f"{seconds.get(role, 0.0) / 3600:.3g}"
