"""Seconds of collectives within an engine: all-reduce, all-to-all of experts, pipeline hops."""

from dataclasses import dataclass

from penstock.perf.model.hardware import Hardware
from penstock.perf.model.parallel import Parallel
from penstock.perf.model.shape import Moe
from penstock.perf.roofline.factors import Factors

_LOW_LATENCY_TOKENS = 256
"""Tokens per device up to which all-to-all uses the low-latency kernels, which send each copy separately."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives of one engine. `row_bytes` is the size of one token's hidden state in an all-reduce."""

    hardware: Hardware
    factors: Factors
    parallel: Parallel
    hidden: int
    row_bytes: float

    def all_reduce_s(self, rows: float) -> float:
        """Seconds of one all-reduce of `rows` hidden states over the tensor-parallel devices.

        The cost has three parts: a latency, a ramp while one kernel becomes several that wait for each other, and the
        link.

        Source: all-reduces of TensorRT-LLM and vLLM that aiconfigurator measured on H100, H200 and GB200
        (`tests/data/all_reduce_tables.json`); the form is within a third of most of them, from 4 KiB to 256 MiB.
        """
        tp, factors = self.parallel.tp, self.factors
        if tp == 1:
            return 0.0
        sent = rows * self.row_bytes * 2 * (tp - 1) / tp
        ramp_s = factors.all_reduce_ramp_s * (tp - 1) * sent / (sent + factors.all_reduce_ramp_bytes)
        link = self._link_bytes_per_s(tp) * factors.all_reduce_bandwidth
        return factors.all_reduce_s + ramp_s + sent / link

    def all_to_all_s(self, moe: Moe, tokens: float) -> float:
        """Seconds to send each device's tokens to their experts in 8 bits and back in 16 bits; NVLink and network overlap.

        Few tokens cross the network once per expert. Many tokens cross once per NVLink domain with some of their experts
        and are forwarded within it.

        Source: DeepEP (DeepSeek, 2025), its low-latency and its normal kernels.
        """
        ep, reached = self.parallel.ep, self.factors.collective_bandwidth
        token_bytes = tokens * self.hidden * (1 + 2)
        domain = min(ep, self.hardware.scale_up_devices)
        rate = reached * self.hardware.scale_up_bytes_per_s
        within = moe.experts_per_token * (domain - 1) / domain * token_bytes / rate
        domains = ep / domain
        limit = min(domains, moe.expert_groups_per_token or domains)
        hit = limit * (1 - (1 - 1 / limit) ** moe.experts_per_token)
        rate = reached * self.hardware.scale_out_bytes_per_s
        copies = max(hit, moe.experts_per_token * min(1.0, _LOW_LATENCY_TOKENS / tokens))
        across = copies * (1 - 1 / domains) * token_bytes / rate
        return 2 * self.factors.collective_s + max(within, across)

    def hop_s(self, rows: float) -> float:
        """Seconds to send `rows` hidden states to the next pipeline stage."""
        if self.parallel.pp == 1:
            return 0.0
        sent = rows * self.row_bytes / self.parallel.tp
        link = self._link_bytes_per_s(self.parallel.devices) * self.factors.collective_bandwidth
        return self.factors.collective_s + sent / link

    def _link_bytes_per_s(self, devices: int) -> float:
        """Give the bandwidth of the slowest link among `devices` neighbours."""
        fits = devices <= self.hardware.scale_up_devices
        return self.hardware.scale_up_bytes_per_s if fits else self.hardware.scale_out_bytes_per_s
