"""What the operator does, as metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorMetrics:
    """Metrics of one operator. One event loop owns them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reconciles = Counter(
            "penstock_operator_reconciles",
            "Times that the operator worked on a graph, by outcome: done; failed, as the API server did not answer or refused;"
            " crashed, by a mistake of the operator.",
            ["outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "penstock_operator_reconcile_seconds", "Time of each.", buckets=_SECONDS, registry=registry
        )
        self.queued = Gauge(
            "penstock_operator_queued_graphs", "Graphs that wait to be worked on.", registry=registry
        )
        self.graphs = Gauge(
            "penstock_operator_graphs",
            "PenstockGraphs of the namespace, 0 while another operator acts.",
            registry=registry,
        )
        self.leads = Gauge(
            "penstock_operator_leader", "1 while this operator acts, 0 while another does.", registry=registry
        )
