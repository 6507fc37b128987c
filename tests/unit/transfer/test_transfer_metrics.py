"""What an agent counts is what Prometheus gets."""

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from penstock.core.errors import TransferRefused
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.metrics import TransferCollector


async def test_every_counter_is_a_metric() -> None:
    config = TransferConfig(listen=("memory",), transports=("memory",))
    async with TransferAgent("reader", config) as reader, TransferAgent("owner", config) as owner:
        registry = CollectorRegistry()
        registry.register(TransferCollector([reader, owner]))
        here = reader.register(np.zeros(4096, np.uint8))
        owner.register(np.zeros(4096, np.uint8), "there")
        peer = await reader.connect(owner.metadata())
        ranges = here.ranges(0, 100), peer.region("there").ranges(0, 100)
        await reader.post(TransferOp.READ, *ranges, peer, notify=b"x").wait()
        await reader.post(TransferOp.WRITE, *ranges, peer).wait()
        await anext(owner.notifications())
        owner.refused(TransferRefused("no"), "reader")
        said = {"agent": "reader", "transport": "memory"}

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"penstock_transfer_{name}", labels)

        assert value("bytes_total", **said, op="read") == 100
        assert value("bytes_total", **said, op="write") == 100
        assert value("transfers_total", **said) == 2
        assert value("failed_transfers_total", **said) is None
        assert value("cancelled_transfers_total", agent="reader") == 0
        assert value("refusals_total", agent="owner", reason="transfer_refused") == 1
        assert value("notifications_total", agent="reader", direction="sent") == 1
        assert value("notifications_total", agent="owner", direction="received") == 1
        assert value("lost_peers_total", agent="owner") == 0
        assert value("running_transfers", agent="reader") == 0
        text = generate_latest(registry).decode()
        assert text.count("# HELP penstock_transfer_") == 10
