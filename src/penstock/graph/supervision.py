"""The supervisor's timeouts and restart delays."""

import pydantic

from penstock.core.config import Config


class Supervision(Config):
    """When the processes of one machine are killed and restarted."""

    start_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Longest seconds from a process's start until it is ready."""
    liveness_timeout_s: float = pydantic.Field(default=15.0, gt=0)
    """Longest seconds without a heartbeat of a ready process, whose event loop then hangs; after that it is killed and restarted."""
    step_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Longest seconds in which a worker's engine with requests finishes no step; after that it is killed and restarted. Must exceed its longest step."""
    close_timeout_s: float = pydantic.Field(default=15.0, gt=0)
    """Longest seconds that a worker's engine takes to close; after that its processes are killed."""
    restart_delay_s: float = pydantic.Field(default=0.2, gt=0)
    """Seconds before the first restart; doubled for each consecutive one."""
    restart_delay_max_s: float = pydantic.Field(default=10.0, gt=0)
    """The longest delay before a restart, in seconds."""
    healthy_after_s: float = pydantic.Field(default=30.0, gt=0)
    """Seconds of service after which earlier failures are forgotten."""
    spare_processes: int = pydantic.Field(default=1, ge=0, le=64)
    """Spare processes that have imported a worker's modules and replace a failed one; about 300 MB each with the paged engine. 0: a restart takes as long as a start."""
    failed_starts_max: int = pydantic.Field(default=5, ge=1)
    """Consecutive failed starts after which a process is given up."""
