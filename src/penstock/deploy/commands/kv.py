"""`penstock kv`: what the KV caches of running workers keep, and an operator's actions on them."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.core.errors import ConfigError
from penstock.deploy.commands.admin import ask
from penstock.deploy.control.frontend_address import FrontendAddress

_TIMEOUT_S = 630.0  # a prefix may have to be computed
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SESSION_FIELDS = (
    "opened",
    "closed",
    "expired",
    "displaced",
    "yielded",
    "cleared",
    "speculative",
    "speculative_used",
    "speculative_wasted",
)
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
            yield from (("name", options.held), ("session", options.session), ("tenant", options.tenant))
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
    """Describe a worker's tiers, then its sessions and pins."""
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
    for held in acted.get("held") or ():
        kind = (
            "pin"
            if held.get("is_pin")
            else "for a next turn,"
            if held.get("is_speculative")
            else "sub-agent"
            if held.get("is_ephemeral")
            else "session"
        )
        tenant = f" of tenant {held['tenant']}" if held.get("tenant") else ""
        expires_s = held.get("expires_s")
        until = f"{held.get('requests', 0)} requests" if expires_s is None else f"ends in {expires_s:.0f} s"
        yield f"  {kind} {held['name']}{tenant}: {held.get('blocks', 0):,} blocks, {until}"


def _stats(load: dict[str, Any]) -> Iterable[str]:
    """Describe what tiers and sessions have done."""
    yield f"  device {_counts(load, ('prefix_hit_tokens', 'prefilled_tokens', 'preemptions'))}"
    for tier in load.get("kv_tiers") or ():
        times = f"load_s {tier.get('load_s', 0):.2f}, saved_s {tier.get('saved_s', 0):.2f}"
        yield f"  {tier['tier']:6} {_counts(tier, _TIER_FIELDS)}, {times}"
    if sessions := load.get("sessions"):
        kept = f"{sessions['open']} open, {sessions['pinned_blocks']:,} of {sessions['pinned_blocks_max']:,} blocks kept"
        yield f"  sessions {kept}, {_counts(sessions, _SESSION_FIELDS)}"


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
