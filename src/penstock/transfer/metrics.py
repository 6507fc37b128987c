"""What agents count, for Prometheus: `registry.register(TransferCollector([agent]))`."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.transfer.agent import TransferAgent

_AGENT = "agent"


class TransferCollector(Collector):
    """Reads agents' counters when somebody asks; between that it costs nothing."""

    def __init__(self, agents: Iterable[TransferAgent]) -> None:
        """Know the agents of this process; label `agent` is their name."""
        self._agents = tuple(agents)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        moved = _counter("bytes", "Bytes moved by this agent's transfers.", "transport", "op")
        ended = _counter("transfers", "Transfers that were done.", "transport")
        failed = _counter("failed_transfers", "Transfers that ended with an error.", "transport")
        failed_over = _counter(
            "failed_over_transfers", "Transfers that another transport took over from this one.", "transport"
        )
        cancelled = _counter("cancelled_transfers", "Transfers that were cancelled.")
        refused = _counter("refusals", "What peers asked for in vain, by the error's code.", "reason")
        notifications = _counter("notifications", "Notifications.", "direction")
        lost = _counter("lost_peers", "Links to peers that ended without a disconnect here.")
        under_way = GaugeMetricFamily(
            "penstock_transfer_running_transfers", "Transfers under way.", labels=[_AGENT]
        )
        quarantined = GaugeMetricFamily(
            "penstock_transfer_quarantined_regions",
            "Regions that were deregistered and may still be in use.",
            labels=[_AGENT],
        )
        for agent in self._agents:
            name, counters = agent.name, agent.counters
            for op, by_transport in (("read", counters.read_bytes), ("write", counters.written_bytes)):
                for transport, count in by_transport.items():
                    moved.add_metric([name, transport, op], count)
            _add(ended, name, counters.transfers)
            _add(failed, name, counters.failed_transfers)
            _add(failed_over, name, counters.failed_over_transfers)
            _add(refused, name, counters.refused)
            _add(
                notifications,
                name,
                {"sent": counters.notifications_sent, "received": counters.notifications_received},
            )
            cancelled.add_metric([name], counters.cancelled_transfers)
            lost.add_metric([name], counters.lost_peers)
            under_way.add_metric([name], agent.transfers_under_way)
            quarantined.add_metric([name], len(agent.quarantined))
        yield from (
            moved,
            ended,
            failed,
            failed_over,
            cancelled,
            refused,
            notifications,
            lost,
            under_way,
            quarantined,
        )


def _counter(noun: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"penstock_transfer_{noun}", text, labels=[_AGENT, *labels])


def _add(family: CounterMetricFamily, agent: str, counts: Mapping[str, int]) -> None:
    for label, count in counts.items():
        family.add_metric([agent, label], count)
