"""Wall-clock dates for people and logs. Durations and deadlines use the event loop's time."""

import time


def wall_time_s() -> float:
    """Seconds since the epoch; for `created` fields and reports only, never for a duration."""
    return time.time()  # noqa: TID251 - the one named place for dates
