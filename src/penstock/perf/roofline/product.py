"""A matrix product with weights: what of its price does not depend on the rows is worked out once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times `params` weights, at up to `reached` of `flops_per_s`: half of that at `half_rows` rows.

    Reading the weights takes `traffic_s` meanwhile; `overlap` is the exponent of the smooth maximum of both.
    """

    params: float
    flops_per_s: float
    reached: float
    half_rows: float
    traffic_s: float
    overlap: float

    def seconds(self, rows: float) -> float:
        """Price the product of so many rows; nothing for none."""
        if rows <= 0 or self.params <= 0:
            return 0.0
        reached = self.reached * rows / (rows + self.half_rows)
        arithmetic_s = 2 * rows * self.params / (self.flops_per_s * reached)
        if arithmetic_s > self.traffic_s:
            larger_s, smaller_s = arithmetic_s, self.traffic_s
        else:
            larger_s, smaller_s = self.traffic_s, arithmetic_s
        return float(larger_s * (1 + (smaller_s / larger_s) ** self.overlap) ** (1 / self.overlap))
