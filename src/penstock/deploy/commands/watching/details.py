"""The details of one worker, model, tenant, request, decision or planner round of a snapshot."""

from collections.abc import Iterator
from itertools import pairwise

from penstock.deploy.commands.watching.seen import Seen
from penstock.deploy.commands.watching.tables import Table, bar, cost, far, terms, ttft_s
from penstock.deploy.commands.watching.words import line, seconds
from penstock.frontend.watch.snapshot import WorkerRow
from penstock.router.dispatch.journeys import Journey, Part
from penstock.router.explain.explanation import Candidate, Explanation


def details(seen: Seen, table: Table, key: str) -> list[str]:
    """Describe a row of a table; empty where it is there no longer."""
    match table.name:
        case "workers":
            return [text for each in seen.snapshot.workers if each.name == key for text in _worker(each)]
        case "requests":
            return [text for each in seen.requests if each.request_id == key for text in _request(each, seen)]
        case "decisions":
            of_key = (each for each in seen.decisions if f"{each.request_id} {each.worker}" == key)
            return [text for each in of_key for text in _decision(each)]
        case "planner":
            return list(_round(seen, key))
    names = [name.removeprefix("#") for name in table.columns]
    return [
        f"{name}: {cell.text}"
        for row in table.rows
        if row.key == key
        for name, cell in zip(names, row.cells, strict=True)
    ]


def _worker(worker: WorkerRow) -> Iterator[str]:
    where = f"process {worker.pid}" + (f" on {line(worker.host)}" if worker.host else "")
    yield line(f"{worker.name}: {worker.role} worker of {worker.model}, {where}")
    yield line(worker.condition.replace("_", " ") + (f": {worker.problem}" if worker.problem else ""))
    yield (
        f"{worker.running} run, {worker.waiting} wait, {worker.open_requests} of this frontend;"
        f" {worker.preemptions:,} preempted, {worker.sessions} sessions"
    )
    if worker.region is not None:
        yield f"another region: {far(worker.region)}"
    if worker.speed is not None:
        yield (
            f"{seconds(worker.speed.step_s)} a step, {worker.speed.generated_tokens_per_s:,.0f} tokens/s,"
            f" prompts {worker.speed.prefilled_tokens_per_s:,.0f} tokens/s"
        )
    yield (
        f"since it started: {worker.prefilled_tokens:,} prompt tokens computed, {worker.hit_tokens:,} cached,"
        f" {worker.generated_tokens:,} generated"
    )
    for tier in worker.tiers:
        yield (
            f"{bar(tier)}: {tier.active_blocks:,} blocks in use, {tier.cached_blocks:,} cached of {tier.total_blocks:,};"
            f" {tier.hit_tokens:,} prompt tokens came from it"
        )
    for link in worker.links:
        speed = f", {link.num_bytes / link.seconds / 1e6:,.1f} MB/s" if link.seconds else ""
        yield line(f"KV from {link.source}: {link.num_bytes / 1e6:,.1f} MB by {link.transport}{speed}")


def _request(journey: Journey, seen: Seen) -> Iterator[str]:
    yield line(
        f"{journey.request_id}: {journey.model}" + (f", tenant {journey.tenant}" if journey.tenant else "")
    )
    cached = "" if journey.cached_tokens is None else f", {journey.cached_tokens:,} of them cached"
    yield f"frontend: {journey.prompt_tokens:,} prompt tokens{cached}"
    decisions = [each for each in seen.decisions if each.request_id == journey.request_id]
    why = f", {decisions[-1].reason.replace('_', ' ')}" if decisions else ""
    yield f"router: queued {seconds(journey.queued_s)}{why}"
    yield from _legs(journey)
    moved = f", moved {journey.migrations} times as workers were lost" if journey.migrations else ""
    yield (
        f"{journey.output_tokens:,} tokens of output, first after {seconds(ttft_s(journey))}, {journey.outcome or 'under way'}"
        f" after {seconds(journey.seconds)}{moved}"
    )
    for each in decisions:
        yield ""
        yield from _decision(each)


def _legs(journey: Journey) -> Iterator[str]:
    for before, leg in pairwise((None, *journey.legs)):
        assert leg is not None, "only the first of the pairs has none before"
        if before is not None and leg.part is Part.DECODE:
            until_s = (leg.first_token_s or journey.seconds) - leg.sent_s
            yield line(f"KV transfer: {before.worker} to {leg.worker}, {seconds(until_s)} to its first token")
        what = {Part.PREFILL: "prefill", Part.DECODE: "decode", Part.WHOLE: "prefill and decode"}[leg.part]
        if before is not None and leg.part is Part.WHOLE:
            what = "goes on"
        yield line(f"{what}: {leg.worker}, {seconds((leg.ended_s or journey.seconds) - leg.sent_s)}")


def _decision(each: Explanation) -> Iterator[str]:
    yield line(
        f"decision of {seconds(each.age_s)} ago for {each.request_id}, policy {each.policy}: {each.reason.replace('_', ' ')}"
    )
    prefill = each.prefill
    if prefill is not None:
        yield line(
            f"prompt {f'by {prefill.worker}' if prefill.remote else 'where the answer is'}: "
            f"{cost(prefill.prefill, each.unit)} on a prefill worker and {cost(prefill.decode, each.unit)} on a decode worker,"
            f" against {cost(prefill.local, each.unit)} on one"
        )
        yield from _candidates("prefill workers by cost", prefill.candidates, each.unit)
    yield from _candidates("workers by cost", each.candidates, each.unit)
    if each.left_out:
        yield line(f"left out: {', '.join(f'{left.worker} {left.why}' for left in each.left_out)}")


def _candidates(title: str, found: tuple[Candidate, ...], unit: str) -> Iterator[str]:
    if found:
        yield f"{title}:"
    for each in found:
        yield "  " + line(
            f"{each.worker}: {cost(each.cost, unit)} = {terms(each.terms)}; {each.overlap_blocks} blocks cached"
        )


def _round(seen: Seen, key: str) -> Iterator[str]:
    overview = seen.snapshot.overview
    for each in () if overview is None or overview.planner is None else overview.planner:
        if str(each.number) != key:
            continue
        yield line(f"round {each.number}, {each.outcome.replace('_', ' ')}: {each.text}")
        if each.shortfall:
            yield line(f"the SLO is out of reach: {each.shortfall}")
        for term in each.terms:
            yield line(
                f"{term.role}: now {term.now}, floor {term.floor}, reaction {term.reaction}, keep {term.keep}, choice {term.choice}"
                + (f"; not fewer: {term.why_not_fewer}" if term.why_not_fewer else "")
            )
