"""How patient a supervisor is with the processes it runs."""

import pydantic

from penstock.core.config import Config


class Supervision(Config):
    """When processes on one machine are started again."""

    start_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Seconds that a process gets from its start until it is ready."""
    liveness_timeout_s: float = pydantic.Field(default=15.0, gt=0)
    """Seconds that a ready process may send its supervisor no heartbeat, as its event loop stands still; then it is killed and started again."""
    step_timeout_s: float = pydantic.Field(default=300.0, gt=0)
    """Seconds in which a worker's engine that has requests may finish no step; then it is killed and started again. Longer than its longest step."""
    restart_delay_s: float = pydantic.Field(default=0.2, gt=0)
    """Seconds before the first restart; doubled for each further one in a row."""
    restart_delay_max_s: float = pydantic.Field(default=10.0, gt=0)
    """The longest delay before a restart, in seconds."""
    healthy_after_s: float = pydantic.Field(default=30.0, gt=0)
    """Seconds of service after which earlier failures are forgotten."""
    spare_processes: int = pydantic.Field(default=1, ge=0, le=64)
    """Processes that have imported what workers need and wait to take the place of one that fails; about 300 MB each with the paged engine. 0: none, and a restart
    takes as long as a start."""
    failed_starts_max: int = pydantic.Field(default=5, ge=1)
    """Failed starts in a row after which a process is given up."""
