"""What all processes of this host share: secret, hash key, runtime directory, the registry, and where workers listen."""

import asyncio
import ipaddress
import os
import random
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.deploy.location import location_here
from penstock.deploy.messages import Common
from penstock.deploy.planes import Planes
from penstock.deploy.secret import deployment_secret, has_secret, shared_hash_key
from penstock.deploy.state import RuntimeDirectory, load_hash_key, state_dir
from penstock.deploy.supervisor.watchdog import tick_s
from penstock.graph import Graph
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.discovery.local import LocalHub
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import KubernetesAccess
from penstock.runtime.tls import PlaneTls

_RESOLVE_S = 10.0


@dataclass(frozen=True, slots=True)
class SharedState:
    """What all processes of this host share, and the hub where this host has one."""

    common: Common
    hub: LocalHub | None


async def create_shared(
    graph: Graph, stack: AsyncExitStack, *, log_level: str, admin_token: str
) -> SharedState:
    """Create it; `stack` ends it.

    Raises:
        ConfigError: a secret is missing, a file is unreadable, an address cannot be listened on, or a name cannot be resolved
            or used.
        Unavailable: the registry of another host does not answer or refuses this one.
    """
    spec = graph.runtime
    secret = deployment_secret(spec)
    listen, advertise = worker_address(spec)
    location_here(graph.router.location)  # said before anything starts
    await _expect_resolvable("runtime.advertise", advertise)
    transfer = graph.worker.kv_transfer.transfer
    await _expect_resolvable("worker.kv_transfer.transfer.advertise", transfer.advertise or "")
    is_shared = spec.spans_hosts or spec.leader is not None or (bool(graph.regions) and has_secret(spec))
    hash_key = shared_hash_key(secret, graph.name) if is_shared else load_hash_key(state_dir(graph.name))
    directory = RuntimeDirectory()
    stack.callback(directory.remove)
    identity = Identity(process="supervisor", hash_key=hash_key, secret=secret)
    hub = None
    if spec.discovery == "local" and spec.join is None:
        hub = await start_hub(spec, identity, f"unix://{directory.path}/hub.sock", stack)
    common = Common(
        graph_json=graph.model_dump_json(),
        runtime_dir=str(directory.path),
        hub_address=spec.join or (hub.address if hub else ""),
        secret=secret,
        hash_key=hash_key,
        log_level=log_level,
        supervisor_pid=os.getpid(),
        admin_token=admin_token,
        heartbeat_interval_s=tick_s(graph.supervision),
        listen=listen,
        advertise=advertise,
    )
    if hub is None or graph.runtime.events != "direct":
        planes = Planes(graph, common, identity, rng=random.Random())
        async with planes:  # said before anything starts
            await planes.connect()
    return SharedState(common, hub)


def worker_address(spec: RuntimeSpec) -> tuple[str, str]:
    """Say where workers of this host listen, and the host that they register.

    Returns:
        the address, empty for private sockets; the host, empty for that of the address.

    Raises:
        ConfigError: workers would listen on every address, and nothing says which one others reach.
    """
    if spec.listen is None and not spec.spans_hosts:
        return "", ""
    if spec.listen is not None:
        address = Address.parse(spec.listen, source="runtime.listen")
    else:
        address = Address(host=_own_host(spec))
    if _is_any(address.host) and not spec.advertise:
        where = "runtime.listen" if spec.listen is not None else "runtime.hub"
        raise ConfigError(
            f"{where}: {address.host} is every address of this host, of which workers register one; set runtime.advertise"
        )
    return str(address), spec.advertise or ""


async def start_hub(spec: RuntimeSpec, identity: Identity, private: str, stack: AsyncExitStack) -> LocalHub:
    """Start the hub; one that other hosts reach keeps a registration for a lease, as networks break where processes live.

    Raises:
        ConfigError: this host does not have its address, or the port is in use.
    """
    config, tls = spec.registry, None
    if spec.hub is not None:
        config = config.model_copy(update={"linger_s": max(config.linger_s, config.lease_ttl_s)})
        tls = PlaneTls.of(spec.tls)
        if tls is not None:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(tls.watch(), name="certificates").cancel)
    hub = LocalHub(identity, listen=spec.hub or private, tls=tls, config=config)
    try:
        await hub.start()
    except ConfigError as error:
        if spec.hub is None:
            raise
        raise ConfigError(
            f"runtime.hub: {error.message}; where another supervisor has the registry, join it by --join {spec.hub}"
        ) from error
    stack.push_async_callback(hub.close)
    return hub


def _own_host(spec: RuntimeSpec) -> str:
    """Give the address of this host that the others reach: of the hub here, or by which this host reaches the other one's."""
    if spec.hub is not None:
        return Address.parse(spec.hub, source="runtime.hub").host
    if spec.join is not None:
        field, there = "runtime.join", Address.parse(spec.join, source="runtime.join")
    else:
        if spec.discovery == "kubernetes":
            field, parts = "kubernetes", urlsplit(KubernetesAccess.find().server)
        else:
            field, parts = "runtime.urls", urlsplit(spec.urls[0])
        there = Address(host=parts.hostname or "", port=parts.port or 1)
    try:
        family, _, _, _, place = socket.getaddrinfo(there.host, there.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            host: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"{field}: {there}: {error.strerror or error}; expected an address that this host reaches"
        ) from error
    return host


async def _expect_resolvable(field: str, host: str) -> None:
    """Check that a name that other hosts shall use has an address.

    Raises:
        ConfigError: it has none, as far as this host knows.
    """
    if not host:
        return
    try:
        async with asyncio.timeout(_RESOLVE_S):
            await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{field}: {host!r} cannot be resolved here: {why or f'no answer within {_RESOLVE_S:g} s'}; expected an address,"
            " or a host name that all hosts resolve"
        ) from error


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a host name
