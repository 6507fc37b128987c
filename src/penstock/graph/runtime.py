"""The graph's runtime settings: how the processes of a deployment find and reach each other."""

import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.runtime.config import BroadcastConfig, DiscoveryConfig
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE
from penstock.runtime.tls import PlaneTlsConfig


class RuntimeSpec(Config):
    """How the processes of a deployment find and reach each other; by default all are on one host and need no setting."""

    discovery: Literal["local", "etcd", "nats", "kubernetes"] = "local"
    """Where workers are registered: `local` is in a supervisor, `etcd` (v3) and `nats` (with JetStream) in one that runs already, `kubernetes` in Leases of the cluster whose pods they are, or that KUBECONFIG names."""
    urls: tuple[str, ...] = ()
    """Of etcd `http://HOST:2379` or https, of NATS `nats://HOST:4222` or tls, without user and password; https and tls use the files of `tls`."""
    registry_credentials_file: str | None = None
    """File with the account at the registry of `urls`: a line USER:PASSWORD or, for NATS, a token, an nkey's seed, or a .creds file. It is read again for each connection; the variable PENSTOCK_REGISTRY_CREDENTIALS is another place for it."""
    namespace: str | None = None
    """Under which name registries of other makers keep this deployment; null is the graph's name."""
    hub: str | None = None
    """`tcp://HOST:PORT` of this host where the supervisor's registry listens for other hosts; null for this host alone."""
    join: str | None = None
    """The `hub` of another host, whose deployment this host's processes are part of; `penstock up --join` sets it."""
    listen: str | None = None
    """`tcp://HOST:0` where each worker listens for requests; null is a private Unix socket or, with other hosts, the address by which this host reaches them."""
    advertise: str | None = None
    """Host name or address under which other hosts reach the workers of this one; null is that of `listen`."""
    leader: str | None = None
    """`tcp://HOST:PORT` of node 0 of a worker over several nodes (`nodes` of its role), where its followers join; `penstock up --leader` sets it on each node."""
    ports: str | None = None
    """`FIRST-LAST`, such as 7500-7599, where workers of this host listen, so that a firewall can let them through: two ports for each worker, one for requests and one for KV transfers, and two more for a worker that takes another's place. null is any free port. NIXL has ports of its own."""
    secret_file: str | None = None
    """File with the deployment's secret, at least 16 characters, which all hosts share; the variable PENSTOCK_SECRET is another place for it. Block hashes are keyed by it, too."""
    events: Literal["direct", "nats"] = "direct"
    """What carries KV events and load reports from workers to routers: `direct` is each router's connection to each worker, `nats` a subject of a NATS."""
    event_urls: tuple[str, ...] = ()
    """Of the NATS that carries events, `nats://HOST:4222` or tls; empty are those of discovery by nats, with its account."""
    event_credentials_file: str | None = None
    """File with the account at the NATS of `event_urls`, as `registry_credentials_file` has it; or the variable PENSTOCK_EVENT_CREDENTIALS."""
    broadcast: BroadcastConfig = BroadcastConfig()
    """Bounds and times of events by nats."""
    tls: PlaneTlsConfig | None = None
    """Certificates for connections between hosts; null for none. A secret is needed with them, too."""
    probes: str | None = None
    """`tcp://HOST:PORT` where this host's supervisor answers `/live` and `/ready` by HTTP, as probes of Kubernetes ask; null for nowhere."""
    registry: DiscoveryConfig = DiscoveryConfig()
    """Leases, and how clients of the registry reconnect; with discovery kubernetes `lease_ttl_s` is 15 by default."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _lengthen_leases(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("discovery") != "kubernetes":
            return data
        registry = data.get("registry", {})
        if not isinstance(registry, dict):
            return data
        return {**data, "registry": {"lease_ttl_s": _KUBERNETES_LEASE_S, **registry}}

    @pydantic.field_validator("hub", "join", "probes", "leader")
    @classmethod
    def _check_hub(cls, address: str | None) -> str | None:
        if address is not None and not _tcp(address).port:
            raise wrong(f"must name a port, so that others find it, got {address!r}; such as 7400")
        return address

    @pydantic.field_validator("listen")
    @classmethod
    def _check_listen(cls, address: str | None) -> str | None:
        if address is not None:
            _tcp(address)
        return address

    @pydantic.field_validator("ports")
    @classmethod
    def _check_ports(cls, ports: str | None) -> str | None:
        if ports is None:
            return None
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", ports)
        if found is None or not 0 < int(found[1]) < int(found[2]) <= _PORT_MAX:
            raise wrong(
                f"must be FIRST-LAST with 1 <= FIRST < LAST <= {_PORT_MAX}, as 7500-7599, got {ports!r}"
            )
        return ports

    @pydantic.field_validator("advertise")
    @classmethod
    def _check_advertise(cls, host: str | None) -> str | None:
        if host is not None and (not host.strip() or "/" in host):
            raise wrong(f"must be a host name or an address without a port, such as 10.0.0.5, got {host!r}")
        return host

    @pydantic.model_validator(mode="after")
    def _check_places(self) -> Self:
        if self.hub is not None and self.join is not None:
            raise wrong(
                f"a host has a hub of its own or joins another, got hub {self.hub} and join {self.join}; leave one out"
            )
        if self.ports is not None and self.listen is None and not self.spans_hosts:
            raise wrong(f"ports {self.ports} have no effect without listen; set listen: tcp://0.0.0.0:0")
        if self.ports is not None and self.listen is not None and _tcp(self.listen).port:
            raise wrong(
                f"listen {self.listen} names a port and ports is {self.ports}; leave the port 0, and each worker gets two of ports"
            )
        if self.advertise is not None and self.listen is None and not self.spans_hosts:
            raise wrong(
                f"advertise {self.advertise} has no effect without listen; set listen: tcp://0.0.0.0:0"
            )
        return self

    @pydantic.field_validator("urls", "event_urls", mode="before")
    @classmethod
    def _refuse_accounts(cls, urls: Any, info: pydantic.ValidationInfo) -> Any:
        given = urls if isinstance(urls, list | tuple) else [urls]
        if any("@" in str(url) for url in given):
            is_registry = info.field_name == "urls"
            field = "registry_credentials_file" if is_registry else "event_credentials_file"
            variable = REGISTRY_VARIABLE if is_registry else EVENTS_VARIABLE
            raise wrong(
                f"a URL has a user or password (not shown), and whoever sees the graph would read it; leave it out there, and put it"
                f" into the file of runtime.{field}, or {variable}, as USER:PASSWORD"
            )
        return urls

    @pydantic.field_validator("urls", "event_urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in _SCHEMES or not parts.hostname or parts.path.strip("/"):
                raise wrong(f"must be http://HOST:PORT, https, nats or tls, got {url!r}")
        return urls

    @pydantic.field_validator("namespace")
    @classmethod
    def _check_namespace(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name):
            raise wrong(
                f"must be up to 63 letters, digits, '_' or '-', the first a letter or digit, got {name!r}"
            )
        return name

    @pydantic.model_validator(mode="after")
    def _check_accounts(self) -> Self:
        if self.registry_credentials_file is not None and not self.urls:
            raise wrong(
                f"registry_credentials_file has no effect without urls, got {self.registry_credentials_file}; leave it out"
            )
        if self.event_credentials_file is not None and not self.event_urls:
            raise wrong(
                f"event_credentials_file is for event_urls, and there are none, got {self.event_credentials_file};"
                " leave it out: registry_credentials_file counts for discovery nats"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_registry(self) -> Self:
        if self.discovery == "local":
            if self.urls:
                raise wrong(
                    f"urls has no effect with discovery local, got {', '.join(self.urls)}; set discovery: etcd"
                )
            return self
        if self.discovery == "kubernetes":
            if self.urls:
                raise wrong(
                    f"urls has no effect with discovery kubernetes, got {', '.join(self.urls)}; the pod's service account or"
                    " KUBECONFIG says where the API server is"
                )
        elif not self.urls:
            raise wrong(f"discovery {self.discovery} needs urls, such as [{_URLS[self.discovery]}]")
        schemes = {urlsplit(url).scheme for url in self.urls}
        if not schemes <= _DISCOVERY_SCHEMES.get(self.discovery, set()):
            raise wrong(
                f"discovery {self.discovery} has urls such as {_URLS[self.discovery]}, got {', '.join(self.urls)}"
            )
        if self.hub is not None or self.join is not None:
            raise wrong(
                f"hub and join are of discovery local, got discovery {self.discovery}; leave them out"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_events(self) -> Self:
        if self.events == "direct":
            if self.event_urls:
                raise wrong(
                    f"event_urls has no effect with events direct, got {', '.join(self.event_urls)}; set events: nats"
                )
            return self
        if not self.nats_urls:
            raise wrong(f"events nats needs event_urls, such as [{_URLS['nats']}]")
        if not {urlsplit(url).scheme for url in self.nats_urls} <= _DISCOVERY_SCHEMES["nats"]:
            raise wrong(
                f"events nats has event_urls such as {_URLS['nats']}, got {', '.join(self.nats_urls)}"
            )
        return self

    @property
    def nats_urls(self) -> tuple[str, ...]:
        """Of the NATS that carries events."""
        return self.event_urls or (self.urls if self.discovery == "nats" else ())

    @property
    def spans_hosts(self) -> bool:
        """Whether processes of other hosts may belong to the deployment."""
        return self.discovery != "local" or self.hub is not None or self.join is not None


_PORT_MAX = 65_535
_DISCOVERY_SCHEMES = {"etcd": {"http", "https"}, "nats": {"nats", "tls"}}
_SCHEMES = {"http", "https", "nats", "tls"}
_KUBERNETES_LEASE_S = 15.0
"""As many renewals as nodes make in clusters of a third of the size."""
_URLS = {"etcd": "http://10.0.0.1:2379", "nats": "nats://10.0.0.1:4222"}


def _tcp(text: str) -> Address:
    """Parse a TCP address; a wrong one is an error of pydantic."""
    try:
        address = Address.parse(text)
    except ConfigError as error:
        raise wrong(error.message.removeprefix("address: ")) from error
    if address.path:
        raise wrong(f"must be tcp://HOST:PORT, got {text!r}")
    return address
