"""Three scores between 0 and 1, weighted 2 : 2 : 1; the highest sum wins."""

import numpy as np
from numpy.typing import NDArray

from penstock.seams import RoutingContext

PREFIX_WEIGHT, QUEUE_WEIGHT, ROOM_WEIGHT = 2.0, 2.0, 1.0


class WeightedScores:
    """argmax of 2 * matched part of the prompt + 2 * (longest queue - queue) / (longest - shortest) + 1 - KV in use.

    Queue and KV are those that workers report; where all queues are equal, each scores 1.

    Source: the default profile of llm-d's inference scheduler, picker max-score.
    """

    name = "weighted-scores"

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        prefix = context.overlap_blocks / max(context.request_blocks, 1)
        queue = context.waiting_requests.astype(np.float64)
        among = queue[context.eligible]
        low, high = among.min(initial=np.inf), among.max(initial=-np.inf)
        idle = (high - queue) / (high - low) if high > low else np.ones(len(queue))
        in_use = np.minimum(context.active_blocks / np.maximum(context.total_blocks, 1), 1.0)
        return -(PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * idle + ROOM_WEIGHT * (1.0 - in_use))
