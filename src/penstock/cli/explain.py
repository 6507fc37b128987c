"""`penstock explain`: shows routing decisions of a running server, or replays those of a log."""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.cli.admin import ask as ask_server
from penstock.cli.parser import Parser, add_frontend, frontend_of
from penstock.cli.text import columns
from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.events import Tier
from penstock.deploy.control.local_connector import FrontendAddress
from penstock.frontend.http.admin import LATEST_DEFAULT, LATEST_MAX
from penstock.router.explanations import Candidate, PrefillExplanation, RoutingExplanation
from penstock.router.replay import ReplayedDecision, RoutingReplay


def add_explain(parser: Parser) -> None:
    """Add the arguments of `penstock explain`."""
    parser.description = (
        "Show a running server's routing decision about a request, or its latest ones; or replay the decisions of a"
        " log. See docs/routing.md."
    )
    parser.epilog = "Exit code of --replay without --policy: 1 if a decision differs."
    add = parser.add_argument
    add("request_id", nargs="?", metavar="REQUEST_ID", help="the answer's id, such as chatcmpl-0123")
    add_frontend(parser, " or of `penstock router`")
    add(
        "--last",
        type=int,
        metavar="N",
        help="without REQUEST_ID: number of latest decisions (default 16, at most 64)",
    )
    add("--json", action="store_true", help="print the server's JSON unchanged")
    add(
        "--replay",
        type=Path,
        metavar="FILE",
        help="replay a log written with --log-level debug and PENSTOCK_LOG_FORMAT=json",
    )
    add(
        "--policy",
        metavar="NAME",
        help="for --replay: use this policy instead (default: that of the log)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:

    if options.replay is None:
        if options.policy is not None:
            raise ConfigError(
                "--policy: is for --replay FILE, which decides again; what runs has decided already"
            )
        if options.request_id is not None and options.last is not None:
            raise ConfigError(
                f"{options.request_id} and --last: give one of them: one request, or the latest"
            )
        if options.request_id == "":
            raise ConfigError("REQUEST_ID: must be an answer's id, such as chatcmpl-0123, got ''")
        if options.last is not None and not 1 <= options.last <= LATEST_MAX:
            raise ConfigError(f"--last: must be 1 to {LATEST_MAX}, got {options.last}")
        ask(frontend_of(options), options.request_id, options.last, as_json=options.json)
        return 0
    if options.request_id is not None:
        raise ConfigError(f"{options.request_id} and --replay: explain one request, or replay a log")
    if options.last is not None or options.json:
        flag = "--json" if options.last is None else "--last"
        raise ConfigError(f"{flag}: is for what a server says; --replay makes all decisions of its log again")
    return replay(options.replay, options.policy)


EXIT_DIFFERS = 1
_PATHS = ("/admin/explain", "/explain")  # `penstock serve`, `penstock router`
_TRIES = 64  # processes share a port: each connection reaches any of them, and only one knows the request
_SAME_MAX = 10
"""Answers in a row by processes that have answered before, after which no other one is expected."""
_DIFFERENCES_SHOWN = 20
_NOT_FOUND = 404


class _Answer(msgspec.Struct):
    decisions: list[RoutingExplanation]
    pid: int


def ask(server: FrontendAddress, request_id: str | None, last: int | None, *, as_json: bool) -> None:
    """Print a running server's decisions about one request, or the latest ones of all processes that share its port.

    Args:
        server: who is asked.
        request_id: None for the latest decisions.
        last: how many of these.
        as_json: print the JSON of one process unchanged, for the latest decisions that of the process with the newest one.

    Raises:
        ConfigError: what answers there is not Penstock, or of another version.
        Unavailable: no server answers.
        RequestError: the server has no decision about the request.
    """
    if request_id is not None:
        bodies = [_fetch(server, f"/{quote(request_id, safe='')}", tries=_TRIES)]
    else:
        bodies = _latest(server, last or LATEST_DEFAULT)
    answers = [_decode(server, body) for body in bodies]
    if as_json:
        ages = [min((one.age_s for one in answer.decisions), default=math.inf) for answer in answers]
        _print(bodies[ages.index(min(ages))].decode())
        return
    told = [(one, f"by process {answer.pid}") for answer in answers for one in answer.decisions]
    if request_id is None:
        told = sorted(told, key=lambda each: each[0].age_s)[: last or LATEST_DEFAULT][::-1]
    pids = " or ".join(str(answer.pid) for answer in answers)
    _print(
        "\n\n".join("\n".join(_lines(one, by)) for one, by in told) or f"no decisions yet by process {pids}"
    )


def _latest(server: FrontendAddress, last: int) -> list[bytes]:
    """Fetch the latest decisions of each process that shares the port; a new connection reaches any of them."""
    found: dict[int, bytes] = {}
    same = 0
    while same < _SAME_MAX:
        body = _fetch(server, f"?last={last}", tries=1)
        pid = _decode(server, body).pid
        same = same + 1 if pid in found else 0
        found[pid] = body
    return list(found.values())


def _decode(server: FrontendAddress, body: bytes) -> _Answer:
    try:
        return msgspec.json.decode(body, type=_Answer)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{server}: the answer is not Penstock's, or another version's: {error}") from error


def replay(file: Path, policy: str | None) -> int:
    """Repeat a log's decisions, print the differences, and return the exit code.

    Raises:
        ConfigError: the file cannot be read, or has no decisions.
    """
    again = RoutingReplay(policy)
    total, differences = 0, []
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for replayed in again.run(lines):
                total += 1
                if replayed.differs:
                    differences.append(replayed)
    except OSError as error:
        raise ConfigError(f"--replay: {file}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"--replay: {file}: {error.message}") from error
    if not total:
        raise ConfigError(
            f"--replay: {file}: no decisions in {sum(again.other_lines.values())} lines; expected a log written with"
            " --log-level debug and PENSTOCK_LOG_FORMAT=json"
        )
    _print("\n".join([*_differences(differences), _summary(total, len(differences), again, policy)]))
    return EXIT_DIFFERS if differences and policy is None else 0


def _fetch(server: FrontendAddress, rest: str, *, tries: int) -> bytes:
    problem = ""
    for path in _PATHS:
        for _ in range(tries):
            try:
                return ask_server(server, path + rest)
            except RequestError as error:
                problem = error.message if error.param or not problem else problem
                if error.http_status != _NOT_FOUND:
                    raise RequestError(f"{server}: {error.message}") from error
                if error.param is None:
                    break  # no such path: try the other kind of server
    raise RequestError(problem, http_status=_NOT_FOUND)


def _lines(decision: RoutingExplanation, by: str) -> Iterator[str]:
    """Format a decision: title, table of candidates, excluded workers; `by` is the process."""
    yield (
        f"{decision.request_id}  {decision.age_s:.1f} s ago  model {decision.model}  policy {decision.policy}  {by}"
    )
    tokens, blocks = _counted(decision.request_tokens, "token"), _counted(decision.request_blocks, "block")
    size = f"{tokens}, {blocks} of {decision.block_size}"
    yield f"to {decision.worker} ({decision.reason}), next {decision.next_worker or 'nobody'}; {size}"
    prefill = decision.prefill
    if prefill is not None:
        yield _where(prefill, decision.unit)
        if prefill.worker is not None:
            why = "" if prefill.reason is None else f" ({prefill.reason})"
            yield f"prompt to {prefill.worker}{why}, next {prefill.next_worker or 'nobody'}"
            yield from _table(prefill.candidates, prefill.num_candidates, decision.unit)
            yield f"answer by {decision.worker}"
    moves = prefill is not None and prefill.remote
    yield from _table(decision.candidates, decision.num_candidates, decision.unit, moves=moves)
    if decision.left_out:
        named = ", ".join(f"{left.worker} {left.why}" for left in decision.left_out)
        more = decision.num_left_out - len(decision.left_out)
        yield f"left out: {named}" + (f" and {more} more" if more else "")


def _table(candidates: Sequence[Candidate], total: int, unit: str, *, moves: bool = False) -> Iterator[str]:
    """Format candidates as a table, the chosen one first; with `moves`, the column `object` is a KV transfer."""
    first = candidates[0]
    tiers = [tier for tier in first.tier_blocks if any(c.tier_blocks[tier] for c in candidates)]
    names = ["to move" if moves and tier is Tier.OBJECT else str(tier) for tier in tiers]
    head = ["worker", "cost" if unit == "none" else f"cost {unit}", *first.terms, "cached", *names]
    rows = [head, *(_row(candidate, tiers) for candidate in candidates)]
    yield from (f"  {text}" for text in columns(rows, range(1, len(head))))
    if more := total - len(candidates):
        yield f"  and {more} more"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _where(prefill: PrefillExplanation, unit: str) -> str:
    """Format whether the prompt is prefilled remotely, with the costs compared."""
    where = "prompt by a prefill worker" if prefill.remote else "prompt where the answer is"
    if prefill.prefill is None or prefill.decode is None or prefill.local is None:
        why = "not compared by cost" if prefill.remote else "too little of it is to be computed"
        return f"{where}: {why}"
    link, transfer = prefill.link_setup or 0.0, prefill.kv_transfer or 0.0
    total = prefill.prefill + prefill.decode + link
    parts = [
        f"{prefill.prefill_worker or 'prefill'} {prefill.prefill:.1f}",
        f"{prefill.decode_worker or 'decode'} {prefill.decode + link - transfer:.1f}"
        + (f" ({link:.1f} of it for a new link)" if link else ""),
        *([f"KV transfer {transfer:.1f}"] if transfer else []),
    ]
    why = "" if prefill.setting is None else f", by router.disagg.{prefill.setting}"
    alone = f"alone on {prefill.local_worker or 'one worker'} {prefill.local:.1f} {unit}"
    return f"{where}: {' + '.join(parts)} = {total:.1f} {unit}; {alone}{why}"


def _row(candidate: Candidate, tiers: Sequence[str]) -> list[str]:
    cost = "never" if candidate.cost is None else _cost(candidate)
    terms = [f"{value:.1f}" for value in candidate.terms.values()]
    blocks = {str(tier): count for tier, count in candidate.tier_blocks.items()}
    return [
        candidate.worker,
        cost,
        *terms,
        str(candidate.overlap_blocks),
        *(str(blocks[tier]) for tier in tiers),
    ]


def _cost(candidate: Candidate) -> str:
    """Format milliseconds; costs of other policies may be of any size."""
    return f"{candidate.cost:.1f}" if candidate.terms else f"{candidate.cost:.4g}"


def _differences(differences: Sequence[ReplayedDecision]) -> Iterator[str]:
    for one in differences[:_DIFFERENCES_SHOWN]:
        unit = "" if one.unit == "none" else f" {one.unit}"
        less = "" if one.costs_more is None else f" {one.costs_more:.1f}{unit} less"
        yield f"{one.request_id}  {one.worker} -> {one.again}  by {one.policy}{less}"
    if len(differences) > _DIFFERENCES_SHOWN:
        yield f"and {len(differences) - _DIFFERENCES_SHOWN} more"


def _summary(total: int, differing: int, again: RoutingReplay, policy: str | None) -> str:
    others = "".join(f", {count} other lines ({kind})" for kind, count in sorted(again.other_lines.items()))
    by = "the policies that made them" if policy is None else policy
    return f"{total} decisions by {by}: {total - differing} the same, {differing} not{others}"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
