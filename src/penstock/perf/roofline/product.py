"""A matrix product with weights; its constant parts are precomputed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times `params` weights, at up to the fraction `reached` of `flops_per_s`, and half of it at `half_rows` rows.

    Reading the weights takes `traffic_s`; `overlap` is the exponent of the smooth maximum of both times.
    """

    params: float
    flops_per_s: float
    reached: float
    half_rows: float
    traffic_s: float
    overlap: float

    def seconds(self, rows: float) -> float:
        """Seconds of the product of `rows` rows; 0 for 0 rows."""
        if rows <= 0 or self.params <= 0:
            return 0.0
        reached = self.reached * rows / (rows + self.half_rows)
        arithmetic_s = 2 * rows * self.params / (self.flops_per_s * reached)
        if arithmetic_s > self.traffic_s:
            larger_s, smaller_s = arithmetic_s, self.traffic_s
        else:
            larger_s, smaller_s = self.traffic_s, arithmetic_s
        return float(larger_s * (1 + (smaller_s / larger_s) ** self.overlap) ** (1 / self.overlap))
