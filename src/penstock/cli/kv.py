"""`penstock kv`: what the KV caches of running workers keep, and an operator's actions on them."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.cli.admin import ask
from penstock.cli.parser import Parser, add_frontend, frontend_of
from penstock.core.errors import ConfigError
from penstock.deploy.control.local_connector import FrontendAddress


def add_kv(parser: Parser) -> None:
    """Add the arguments of `penstock kv`."""
    parser.description = (
        "Show what the KV caches of a running server's workers keep, and pin, prefetch, evict or flush prefixes."
        " Engines paged and mock. See docs/agents.md and docs/kv-tiers.md."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = _adder(actions)
    add("ls", "list each worker's tiers and pins")
    add("stats", "show what each tier has done since the worker's start")
    flush = add("flush", "clear the cache of all tiers; pins end")
    flush.add_argument("--tier", metavar="TIER", help="device: on the device alone (default: all tiers)")
    pin = add("pin", "compute a prefix where no worker has it, and keep it on the device")
    pin.add_argument("held", metavar="NAME", help="what the pin is called; another of this name is replaced")
    _add_prompt(pin)
    pin.add_argument(
        "--ttl", type=float, metavar="S", help="the pin ends after so many seconds (default: retention.ttl_s)"
    )
    unpin = add("unpin", "end a pin")
    unpin.add_argument("held", metavar="NAME", help="the pin's name")
    prefetch = add("prefetch", "have a worker compute a prefix, or load it from lower tiers", by_worker=False)
    _add_prompt(prefetch)
    evict = add("evict", "drop a prefix from devices, as far as nothing uses it")
    _add_prompt(evict)


def _adder(actions: Any) -> Any:
    def add(name: str, text: str, *, by_worker: bool = True) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text}.".capitalize()
        )
        add_frontend(parser)
        parser.add_argument("--json", action="store_true", help="print the server's JSON unchanged")
        if by_worker:
            parser.add_argument(
                "--worker", metavar="WORKER", help="its name in GET /admin/workers (default: every worker)"
            )
        parser.set_defaults(run=_run, action=name, worker=None)
        return parser

    return add


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", metavar="TEXT", help="the prefix as of /v1/completions")
    given.add_argument("--text-file", type=Path, metavar="FILE", help="a file with such a text")
    given.add_argument(
        "--messages", type=Path, metavar="FILE", help="a JSON file with the messages of a chat"
    )
    given.add_argument("--tokens", type=Path, metavar="FILE", help="a JSON file with a list of token ids")
    parser.add_argument("--model", metavar="MODEL", help="needed where several models are served")


def _run(options: argparse.Namespace) -> int:

    return 0 if run(options.action, frontend_of(options), options) else 1


_TIMEOUT_S = 630.0  # a prefix may have to be computed
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIER_FIELDS = ("hit_tokens", "loads", "loaded_blocks", "offloaded_blocks", "dropped_blocks", "late_loads", "missing_blocks", "corrupt_blocks", "prefetched_blocks", "wasted_blocks")  # fmt: skip
_DONE = {"pin": "pinned", "unpin": "unpinned", "evict": "evicted", "flush": "flushed"}


def run(action: str, server: FrontendAddress, options: argparse.Namespace) -> bool:
    """Run one of the actions and print its result.

    Returns:
        whether every worker that was asked has acted.

    Raises:
        ConfigError: a file of a prompt cannot be read.
        RequestError: the server or a worker refuses.
        Unavailable: no server answers.
    """
    if action in ("ls", "stats"):
        _show(action, server, options)
        return True
    fields = [("worker", options.worker), *_fields(action, options)]
    body = {name: value for name, value in fields if value is not None}
    answer = _json_of(server, f"/admin/kv/{action}", body)
    acted = answer.get("workers", ())
    if options.json:
        _write([json.dumps(answer)])
    elif action == "prefetch":
        cached, total = answer["cached_tokens"], answer["prompt_tokens"]
        _write([f"{total} tokens: {cached} were cached, {total - cached} are computed"])
    else:
        _write(_line(_DONE[action], each) for each in acted)
    return not any(each.get("problem") for each in acted)


def _fields(action: str, options: argparse.Namespace) -> Iterable[tuple[str, Any]]:
    """Give the fields of an action's body."""
    match action:
        case "flush":
            yield "tier", options.tier
        case "unpin":
            yield "name", options.held
        case _:
            yield "model", options.model
            yield _prompt(options)
            if action == "pin":
                yield from (("name", options.held), ("ttl_s", options.ttl))


def _prompt(options: argparse.Namespace) -> tuple[str, Any]:
    """Give the field of the prompt and its value.

    Raises:
        ConfigError: a file cannot be read, or is no JSON list.
    """
    if options.text is not None:
        return "prompt", options.text
    if options.text_file is not None:
        return "prompt", _read("--text-file", options.text_file)
    flag, path, field = (
        ("--messages", options.messages, "messages")
        if options.messages
        else ("--tokens", options.tokens, "prompt")
    )
    try:
        value = json.loads(_read(flag, path))
    except ValueError as error:
        raise ConfigError(f"{flag}: {path}: is not JSON: {error}") from error
    if not isinstance(value, list):
        raise ConfigError(f"{flag}: {path}: must be a JSON list, got {str(value)[:40]}")
    return field, value


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {path}: cannot be read: {error}") from error


def _show(action: str, server: FrontendAddress, options: argparse.Namespace) -> None:
    query = "" if options.worker is None else f"?worker={quote(options.worker, safe='')}"
    workers = {worker["name"]: worker for worker in _json_of(server, "/admin/workers", None)["workers"]}
    listed = _json_of(server, f"/admin/kv{query}", None)["workers"] if action == "ls" else []
    if options.worker is not None and options.worker not in workers:
        raise ConfigError(
            f"--worker: there is no {options.worker!r}; known: {', '.join(sorted(workers)) or 'none'}"
        )
    names = [options.worker] if options.worker is not None else sorted(workers)
    loads = {name: workers[name].get("load") or {} for name in names}
    if options.json:
        held = {acted["worker"]: acted for acted in listed}
        _write([json.dumps({name: {"load": loads[name], **held.get(name, {})} for name in names})])
        return
    lines: list[str] = []
    for name in names:
        acted: dict[str, Any] = next((each for each in listed if each["worker"] == name), {})
        lines += [name, *(_held(loads[name], acted) if action == "ls" else _stats(loads[name]))]
    _write(lines)


def _held(load: dict[str, Any], acted: dict[str, Any]) -> Iterable[str]:
    """Describe a worker's tiers, then its pins."""
    cached, total = load.get("cached_blocks", 0), load.get("total_blocks", 0)
    yield f"  device {cached:,} of {total:,} blocks cached, {load.get('active_blocks', 0):,} in use"
    for tier in load.get("kv_tiers") or ():
        size = tier["block_bytes"]
        off = ", off" if tier["is_off"] else ""
        yield (
            f"  {tier['tier']:6} {tier['cached_blocks']:,} of {tier['total_blocks']:,} blocks cached,"
            f" {_bytes(tier['cached_blocks'] * size)} of {_bytes(tier['total_blocks'] * size)}{off}"
        )
    if problem := acted.get("problem"):
        yield f"  {problem}"
    for pin in acted.get("pins") or ():
        yield f"  pin {pin['name']}: {pin.get('blocks', 0):,} blocks, ends in {pin.get('expires_s', 0):.0f} s"


def _stats(load: dict[str, Any]) -> Iterable[str]:
    """Describe what tiers have done."""
    yield f"  device {_counts(load, ('prefix_hit_tokens', 'prefilled_tokens', 'preemptions'))}"
    for tier in load.get("kv_tiers") or ():
        times = f"load_s {tier.get('load_s', 0):.2f}, saved_s {tier.get('saved_s', 0):.2f}"
        yield f"  {tier['tier']:6} {_counts(tier, _TIER_FIELDS)}, {times}"


def _counts(values: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {values.get(name, 0):,}" for name in names)


def _line(done: str, acted: dict[str, Any]) -> str:
    if problem := acted.get("problem"):
        return str(problem)
    return f"{acted['worker']}: {acted.get('blocks', 0):,} blocks {done}"


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1024 and unit + 1 < len(_UNITS):
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def _json_of(server: FrontendAddress, path: str, body: dict[str, Any] | None) -> Any:
    answer = ask(server, path, body=None if body is None else json.dumps(body).encode(), timeout_s=_TIMEOUT_S)
    try:
        return json.loads(answer)
    except ValueError as error:
        raise ConfigError(f"{server}: the answer is not Penstock's, or another version's") from error


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
