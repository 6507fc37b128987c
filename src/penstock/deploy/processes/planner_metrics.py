"""What the planner does, as metrics of a frontend."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.deploy.messages import Planned

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class PlannerMetrics:
    """Metrics of one deployment's planner. One event loop owns them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(noun: str, text: str, *labels: str) -> Gauge:
            return Gauge(
                f"penstock_planner_{noun}",
                text,
                labels,
                registry=registry,
                multiprocess_mode="livemostrecent",  # of several frontends, one is told
            )

        self._rounds = Counter(
            "penstock_planner_rounds",
            "Rounds by what came of them: changed, kept, held, refused, dry_run, blind, failed.",
            ["outcome"],
            registry=registry,
        )
        self._changes = Counter(
            "penstock_planner_changes",
            "Workers that the planner began to add, retire or flip.",
            ["change"],
            registry=registry,
        )
        self._seconds = Histogram(
            "penstock_planner_round_seconds", "Time of a round.", buckets=_SECONDS, registry=registry
        )
        self._lost = Counter(
            "penstock_planner_lost_log_lines", "Rounds that the log could not keep.", registry=registry
        )
        self._refused = Counter(
            "penstock_planner_refused_hosts",
            "Connections of hosts that the planner refused, such as one with another secret; its log says why.",
            registry=registry,
        )
        self._wanted = gauge("wanted_workers", "Workers that the planner aims at.", "role")
        self._have = gauge("workers", "Workers that serve, or start in time.", "role")
        self._forecast = gauge("forecast", "Mean that is expected of a series of the demand.", "series")
        self._high = gauge("forecast_high", "Upper edge of that expectation, for which is planned.", "series")
        self._error = gauge("forecast_error", "Mean absolute error of the forecast of late.", "series")
        self._watts = gauge("gpu_watts", "What the GPUs of a role's workers draw, by NVML.", "role")
        self._utilization = gauge(
            "gpu_utilization", "Mean share of the time in which they compute, 0 to 1.", "role"
        )
        self._shortfall = gauge("shortfall", "1 if the SLO is not expected to hold with what may run.")

    def take(self, planned: Planned) -> None:
        """Count a round."""
        self._rounds.labels(planned.outcome).inc()
        self._seconds.observe(planned.seconds)
        self._lost.inc(planned.lost)
        self._refused.inc(planned.refused_hosts)
        for change, count in planned.changes.items():
            self._changes.labels(change).inc(count)
        if planned.outcome == "failed":
            return
        for role, count in planned.have.items():
            self._have.labels(role).set(count)
        for role, count in planned.wanted.items():
            self._wanted.labels(role).set(count)
        for role, watts in planned.gpu_watts.items():
            self._watts.labels(role).set(watts)
        for role, share in planned.gpu_utilization.items():
            self._utilization.labels(role).set(share)
        for each in planned.expected:
            self._forecast.labels(each.series).set(each.mean)
            self._high.labels(each.series).set(each.high)
            if each.mean_error is not None:
                self._error.labels(each.series).set(each.mean_error)
        self._shortfall.set(planned.has_shortfall)
