"""Forecast: a linear function of the last values."""

from collections import deque

import numpy as np


class Autoregressive:
    """Fits `value = a + b1 last + b2 the one before …` to recent values by ridge regression, anew every few values."""

    def __init__(self, order: int = 4, *, window: int = 240, refit_every: int = 8) -> None:
        """Begin without values.

        Args:
            order: values that a prediction looks back on.
            window: values that the fit looks back on.
            refit_every: values between two fits.
        """
        if order < 1 or window < 4 * order:
            raise ValueError(
                f"order is {order} and window {window}, expected an order of at least 1 and a window of 4 orders"
            )
        self.name = f"ar {order}"
        self._order = order
        self._refit_every = refit_every
        self._values: deque[float] = deque(maxlen=window)
        self._weights: list[float] = []
        self._since_fit = 0

    def observe(self, value: float) -> None:
        self._values.append(value)
        self._since_fit += 1
        if len(self._values) >= 4 * self._order and (
            not self._weights or self._since_fit >= self._refit_every
        ):
            self._fit()

    def predict(self, steps: int) -> float | None:
        if not self._weights:
            return None
        recent = list(self._values)[-self._order :]
        ceiling = 2 * max(self._values)
        for _ in range(steps):
            following = self._weights[0] + sum(
                weight * value for weight, value in zip(self._weights[1:], reversed(recent), strict=True)
            )
            # An unstable fit must not explode over many steps.
            recent = [*recent[1:], min(max(following, 0.0), ceiling)]
        return recent[-1]

    def _fit(self) -> None:
        values = np.asarray(self._values)
        rows = len(values) - self._order
        columns = [values[self._order - lag : self._order - lag + rows] for lag in range(1, self._order + 1)]
        inputs = np.column_stack([np.ones(rows), *columns])
        ridge = 1e-3 * (float(np.mean(values**2)) + 1e-9) * rows * np.eye(self._order + 1)
        ridge[0, 0] = 0.0
        try:
            weights = np.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ values[self._order :])
        except np.linalg.LinAlgError:
            return
        self._weights = [float(weight) for weight in weights]
        self._since_fit = 0
