"""SGLang's processes on a follower, as `sglang.launch_server --node-rank N` runs them: without the port for health checks."""

import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable

from penstock.core.errors import EngineError
from penstock.engine.launch_host import ThisHost
from penstock.engine.sglang.arguments import (
    PACKAGE,
    environment,
    make_arguments,
    server_arg_names,
    start_error,
)
from penstock.engine.spec import EngineSpec
from penstock.engine.streams.package import check_gpu


def follow(spec: EngineSpec, ready: Callable[[], None]) -> None:
    """Run this node's ranks of a worker over several nodes; block until one of them ends.

    SGLang's own wait sees the first of its processes alone, and gives a port to health checks.

    Args:
        spec: the engine, with `nodes`.
        ready: called once the ranks have loaded their parts.

    Raises:
        ConfigError: SGLang is missing, does not fit, or refuses an argument.
        EngineError: a rank has ended.
    """
    sglang = PACKAGE.load()
    if "device" not in spec.args:
        check_gpu("sglang", spec.device)
    host = ThisHost()
    arguments = make_arguments(spec, server_arg_names(sglang), host)
    os.environ.update(environment(spec, host), SGLANG_BLOCK_NONZERO_RANK_CHILDREN="0")
    try:
        sglang.Engine(**arguments.server)
    except Exception as error:
        raise start_error(spec, error) from error
    ready()
    ranks = multiprocessing.active_children()
    multiprocessing.connection.wait([rank.sentinel for rank in ranks])
    raise EngineError("sglang: one of its processes of this node ended; its own lines above say why")
