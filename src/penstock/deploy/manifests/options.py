"""What rendering needs to know beside the graph: images, names, files, the cache of weights."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

import pydantic

from penstock import __version__
from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError

DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
_SIZE = re.compile(r"[1-9][0-9]*(Mi|Gi|Ti)")
CACHE_PATH = PurePosixPath("/var/cache/penstock")
"""Where the weights of a hub model are kept."""
GRAPH_PATH = PurePosixPath("/etc/penstock")
"""Where the graph's files are."""
_OURS = ("/", "/etc", "/proc", "/sys", "/dev", "/usr", "/opt", "/tmp", str(CACHE_PATH), str(GRAPH_PATH))  # noqa: S108


def _is_plain(path: str) -> bool:
    parts = PurePosixPath(path)
    return (
        parts.is_absolute()
        and ".." not in parts.parts
        and path.isprintable()
        and ":" not in path
        and "$" not in path
    )


class Mount(Config):
    """A directory of every pod: `PATH=KIND:NAME`, where KIND is secret, configmap, claim (a PersistentVolumeClaim) or host."""

    path: str
    kind: Literal["secret", "configmap", "claim", "host"]
    name: str
    """Of the object; of `host` the directory on each node."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Read `/etc/keys=secret:penstock-keys`.

        Raises:
            ConfigError: it is no mount.
        """
        path, _, source = text.partition("=")
        kind, _, name = source.partition(":")
        return cls.parse({"path": path, "kind": kind, "name": name}, source=f"--mount {text}")

    @pydantic.field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        plain = PurePosixPath(path)
        if not _is_plain(path) or path in _OURS or plain.is_relative_to(GRAPH_PATH):
            raise wrong(
                f"must be an absolute path without '..' that is no directory of the image, such as /etc/keys, got {path!r}"
            )
        return str(plain)

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.kind == "host":
            if not _is_plain(self.name):
                raise wrong(f"name: must be an absolute path of the nodes, as host:/data, got {self.name!r}")
        elif not _DNS_SUBDOMAIN.fullmatch(self.name):
            raise wrong(
                f"name: must be a {self.kind}'s name, of small letters, digits, '.' and '-', got {self.name!r}"
            )
        return self

    @property
    def is_writable(self) -> bool:
        return self.kind in {"claim", "host"}


class Cache(Config):
    """Where weights of a hub model are kept: in each pod by itself, in a claim of this size or of another's, or on each node."""

    kind: Literal["pod", "size", "claim", "host"] = "pod"
    name: str = ""
    """For `size`: as 200Gi; for `claim`: of a PersistentVolumeClaim that many nodes may mount; for `host`: a directory of each node."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Read `pod`, `size:200Gi`, `claim:NAME` or `host:/DIRECTORY`.

        Raises:
            ConfigError: it is none of them.
        """
        kind, _, name = text.partition(":")
        return cls.parse({"kind": kind, "name": name}, source=f"--cache {text}")

    @pydantic.model_validator(mode="after")
    def _check_name(self) -> Self:
        good = {
            "pod": not self.name,
            "size": bool(_SIZE.fullmatch(self.name)),
            "claim": bool(_DNS_SUBDOMAIN.fullmatch(self.name)),
            "host": _is_plain(self.name),
        }
        if not good[self.kind]:
            raise wrong(
                f"name: must be pod, size:200Gi, claim:NAME or host:/DIRECTORY, got {self.kind}:{self.name}"
            )
        return self


_FLAGS = {"mounts": "mount", "egress_ports": "egress-port", "network_policy": "no-network-policy"}


def flag_of(field: str) -> str:
    """Name the flag of `penstock render` that sets a field of RenderOptions."""
    return f"--{_FLAGS.get(field, field.replace('_', '-'))}"


class RenderOptions(Config):
    """What a graph does not say of where it runs."""

    image: str = f"penstock:{__version__}"
    """Of frontends, and of workers without GPUs."""
    gpu_image: str = f"penstock-cuda:{__version__}"
    """Of workers with GPUs."""
    namespace: str | None = None
    """Of every object; None leaves it to `kubectl --namespace` or kustomize."""
    secret: str | None = None
    """Name of the Secret with `secret`, and optionally `admin-token`, `api-key`, `hf-token`, `registry-credentials` and `event-credentials`; None is the graph's name with -secret."""
    mounts: tuple[Mount, ...] = ()
    """Files and directories that the graph names."""
    cache: Cache = Cache()
    """Weights of a hub model."""
    service_monitor: bool = False
    """Whether Prometheus's operator is there, whose ServiceMonitor then scrapes the frontends."""
    network_policy: bool = True
    """Whether only the ports in use are open."""
    gateway: str | None = None
    """Name of a Gateway in the same namespace: frontends become an InferencePool with a route and an endpoint picker."""
    egress_ports: tuple[Annotated[int, pydantic.Field(ge=1, le=65535)], ...] = ()
    """Other ports that pods may connect to, such as that of an API server behind its Service, where it is neither 443 nor 6443."""
    nodes: int | None = pydantic.Field(default=None, ge=1, le=1024)
    """Of Slurm; None for the fewest that have the GPUs of all workers."""
    gpus_per_node: int | None = pydantic.Field(default=None, ge=1, le=64)
    """Of Slurm; None for those of a machine with the graph's hardware."""

    @classmethod
    def of_flags(cls, values: Mapping[str, Any]) -> Self:
        """Validate values of flags with the names of fields.

        Raises:
            ConfigError: one line for each wrong flag.
        """
        try:
            return cls.parse(dict(values), source="flag")
        except ConfigError as error:
            lines = [
                re.sub(r"^flag: (\w+): ", lambda found: f"{flag_of(found[1])}: ", line)
                for line in error.message.splitlines()
            ]
            raise ConfigError("\n".join(lines)) from error

    @pydantic.field_validator("image", "gpu_image")
    @classmethod
    def _check_image(cls, image: str) -> str:
        if not _IMAGE.fullmatch(image):
            raise wrong(f"must be an image, such as registry.example.com/penstock:1, got {image!r}")
        return image

    @pydantic.field_validator("namespace")
    @classmethod
    def _check_namespace(cls, name: str | None) -> str | None:
        if name is not None and not DNS_LABEL.fullmatch(name):
            raise wrong(f"must be up to 63 small letters, digits and '-', got {name!r}")
        return name

    @pydantic.field_validator("secret")
    @classmethod
    def _check_secret(cls, name: str | None) -> str | None:
        if name is not None and not _DNS_SUBDOMAIN.fullmatch(name):
            raise wrong(f"must be a Secret's name, of small letters, digits, '.' and '-', got {name!r}")
        return name

    @pydantic.field_validator("gateway")
    @classmethod
    def _check_gateway(cls, name: str | None) -> str | None:
        if name is not None and not _DNS_SUBDOMAIN.fullmatch(name):
            raise wrong(f"must be a Gateway's name, of small letters, digits, '.' and '-', got {name!r}")
        return name

    @pydantic.field_validator("mounts")
    @classmethod
    def _check_mounts(cls, mounts: tuple[Mount, ...]) -> tuple[Mount, ...]:
        paths = [mount.path for mount in mounts]
        for path in paths:
            if paths.count(path) > 1:
                raise wrong(f"{path} is mounted twice; leave one out")
        return mounts

    def mount_of(self, path: str) -> Mount | None:
        """Give the mount that a path is in."""
        found = [mount for mount in self.mounts if PurePosixPath(path).is_relative_to(mount.path)]
        return max(found, key=lambda mount: len(mount.path), default=None)
