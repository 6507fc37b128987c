"""Three simulated regions, one lost for a while: what is told of it is forgotten, nothing is sent there, and nobody else notices for long.

Two planted bugs show that these checks can fail: a summary that is never forgotten, and a lost region that still gets requests.
"""

import random
from pathlib import Path

import pytest

from benchmarks.regions import Federation, Loss, Outcome, Region, Traffic, World
from penstock.engine.openai.health import Breaker
from penstock.engine.openai.prefixes import AdvertisedPrefixes
from penstock.graph import Overrides, load
from penstock.sim.deployment import plan_deployment
from penstock.sim.loop import run

GRAPH = Path("examples/graphs/70b-h100-fp8-tp2-x8.yaml")
WORKERS, DAY_S = 6, 60.0
LOSS = Loss(2, 20.0, 40.0)
FOUND_OUT_S = 6.0
"""Three checks of 0.5 s, each of a round trip and 1 s without an answer."""


class Watched(World):
    """Notes what the other regions still believe of a lost one just before it comes back."""

    believed: tuple[int, ...] = ()
    told_before = 0

    def before_return(self, region: Region) -> None:
        self.believed = tuple(
            index.advertised_by(slot)
            for other in self.regions
            if other is not region
            for index in [other.dispatcher._shared.fleet._indexer.regions]
            for slot, member in enumerate(other.dispatcher._shared.fleet.slots.now())
            if member is not None and member.instance.name == f"link-{region.name}"
        )
        for other in self.regions:
            if other is not region:
                self.told_before += other.dispatcher._shared.fleet._indexer.regions.num_chunks

    @property
    def unanswered_s(self) -> list[float]:
        """Seconds from the loss until each request that was still sent there."""
        return [
            at_s - self.start_s - LOSS.from_s
            for region in self.regions
            for server in region.all_servers
            for at_s in server.crossings.unanswered_s
        ]


def simulate(
    federation: Federation, kind: type[Watched] = Watched, loss: Loss | None = LOSS
) -> tuple[Watched, Outcome]:
    settings = [f"roles.aggregated.replicas={WORKERS}"]
    deployment = plan_deployment(load(str(GRAPH), Overrides(settings)), beside=GRAPH.parent)
    traffic = Traffic(3, DAY_S, 0.5 * WORKERS, documents=40, document_tokens=12_288)
    worlds: list[Watched] = []

    async def main(rng: random.Random) -> Outcome:
        worlds.append(kind(deployment, traffic, federation, rng, loss=loss))
        return await worlds[0].run()

    outcome = run(main, 3)
    return worlds[0], outcome


def check(world: Watched, outcome: Outcome) -> None:
    """Raise AssertionError where the loss of a region hurts longer than it takes to find out."""
    assert world.believed == (0, 0), f"{world.believed} chunks are believed of a region that is lost"
    assert max(world.unanswered_s, default=0.0) <= FOUND_OUT_S, "requests are still sent to the lost region"
    assert not outcome.lost, f"requests of other regions were lost: {outcome.lost}"
    slowest_s = max(
        ttft_s
        for ttft_s, region in zip(outcome.ttft_s, outcome.regions, strict=True)
        if region != LOSS.region
    )
    assert slowest_s < FOUND_OUT_S + 10.0, f"a first token took {slowest_s:.1f} s"


def test_a_lost_region_is_forgotten_and_comes_back() -> None:
    world, outcome = simulate(Federation(bytes_per_s=64_000))
    check(world, outcome)
    assert world.told_before > 0, "what the others tell each other stays"
    back = [s for region in world.regions[:2] for s in region.all_servers if s.name.endswith("region-3")]
    assert all(server.crossings.requests for server in back), "it gets requests"
    assert outcome.at_lost, "clients of the lost region itself notice"


def test_regions_share_what_each_has_computed() -> None:
    _, alone = simulate(Federation(links=False))
    _, linked = simulate(Federation())
    world, told = simulate(Federation(bytes_per_s=64_000))
    assert sum(told.cached_tokens) > 1.1 * sum(linked.cached_tokens) > sum(alone.cached_tokens)
    assert sum(told.ttft_s) < sum(linked.ttft_s) < sum(alone.ttft_s)
    for region in world.regions:
        for server in region.all_servers:
            assert server.crossings.summary_bytes <= 64_000 * DAY_S


def test_a_summary_that_is_never_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdvertisedPrefixes, "clear", lambda _self: ())
    monkeypatch.setattr(AdvertisedPrefixes, "expire", lambda _self, _now_s: ())
    with pytest.raises(AssertionError, match="are believed of a region that is lost"):
        check(*simulate(Federation(bytes_per_s=64_000)))


@pytest.mark.nightly
def test_a_lost_region_that_is_still_priced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaker, "check_failed", lambda _self, _reason, at_once=False: None)
    world, outcome = simulate(Federation(bytes_per_s=64_000))
    assert max(world.unanswered_s) > FOUND_OUT_S
    with pytest.raises(AssertionError):
        check(world, outcome)
