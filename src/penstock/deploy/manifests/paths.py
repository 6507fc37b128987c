"""Files and directories that a graph names: each must be mounted in the pods."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from penstock.deploy.manifests.options import RenderOptions
from penstock.graph import DEMO_MODEL, Graph, RoleSpec

RELATIVE = "is relative to a directory of this machine; name an absolute path, and mount it in the pods"
_SECRET_WORDS = ("secret", "password", "credential", "api_key", "access_key", "token")
_NOT_SECRET = ("tokens", "tokenizer", "api_key_file", "token_id")


def lost_paths(graph: Graph, options: RenderOptions) -> Iterator[str]:
    """Say in one line for each path that is in no mount how to mount it, and for each secret that it must go."""
    for field, path, writes in (*_read_paths(graph), *_written_paths(graph)):
        if (problem := _problem(path, options, writes=writes)) is not None:
            yield f"{field}: {path}: {problem}"
    for field, url in _addresses(graph):
        if _is_loopback(url):
            yield f"{field}: {url}: each pod has a loopback address of its own; name the Service or address of what answers"
    if graph.frontend.access_log not in {None, "-"}:
        yield f"frontend.access_log: {graph.frontend.access_log}: a pod's lines go to stderr, where kubectl logs finds them; set it to -"
    for name, role in graph.roles.present().items():
        if (
            role.kv.disk.path
            and not is_on_disk_of_pod(role, options)
            and options.mount_of(role.kv.disk.path) is None
        ):
            yield (
                f"roles.{name}.kv.disk: {role.kv.disk.path}: is a file of the image; name one in a directory of its own, as"
                " /var/lib/penstock-kv/blocks"
            )
        for place, value in _leaves(role.engine_args, ("roles", name.value, "engine_args")):
            key = str(place[-1]).lower()
            if (
                isinstance(value, str)
                and any(word in key for word in _SECRET_WORDS)
                and not any(word in key for word in _NOT_SECRET)
            ):
                yield f"{'.'.join(map(str, place))}: (not shown): a graph is no place for a secret; leave it out, and set it in the pods' environment"
            elif isinstance(value, str) and value.startswith("/") and options.mount_of(value) is None:
                yield f"{'.'.join(map(str, place))}: {value}: {_no_mount(value)}"
            elif isinstance(value, str) and _is_loopback(value):
                yield f"{'.'.join(map(str, place))}: {value}: each pod has a loopback address of its own; name the server's Service or address"


def is_on_disk_of_pod(role: RoleSpec, options: RenderOptions) -> bool:
    """Whether a role's disk tier gets a volume of each pod: its directory is in no mount, and none of the image."""
    path = PurePosixPath(role.kv.disk.path)
    return bool(role.kv.disk.path) and options.mount_of(str(path)) is None and len(path.parent.parts) > 2


def is_local_model(model: str) -> bool:
    """Whether a model is a directory of the pods, by its name alone: who renders may have none of it."""
    return model != DEMO_MODEL and (model.startswith(("/", "~", ".")) or model.count("/") > 1)


def _addresses(graph: Graph) -> Iterator[tuple[str, str]]:
    """Give what pods connect to, beside servers in an engine's arguments."""
    for field in ("urls", "event_urls"):
        for index, url in enumerate(getattr(graph.runtime, field)):
            yield f"runtime.{field}.{index}", url
    if graph.tracing is not None:
        yield "tracing.endpoint", graph.tracing.endpoint
    for region in graph.regions:
        for index, url in enumerate(region.urls):
            yield f"regions.{region.name}.urls.{index}", url
    for name, role in graph.roles.present().items():
        if (endpoint := role.kv.object.options.get("endpoint")) is not None:
            yield f"roles.{name}.kv.object.options.endpoint", endpoint


def _read_paths(graph: Graph) -> Iterator[tuple[str, str, bool]]:
    if is_local_model(graph.model):
        yield "model", graph.model, False
    given = {
        "frontend.api_key_file": graph.frontend.api_key_file,
        "runtime.secret_file": graph.runtime.secret_file,
        "runtime.registry_credentials_file": graph.runtime.registry_credentials_file,
        "runtime.event_credentials_file": graph.runtime.event_credentials_file,
    }
    for region in graph.regions:
        given[f"regions.{region.name}.api_key_file"] = region.api_key_file
    for section, tls in (
        ("frontend.tls", graph.frontend.tls),
        ("runtime.tls", graph.runtime.tls),
        ("worker.kv_transfer.transfer.tls", graph.worker.kv_transfer.transfer.tls),
        *((f"regions.{region.name}.tls", region.tls) for region in graph.regions),
    ):
        for field in ("certificate", "key", "authority"):
            given[f"{section}.{field}"] = getattr(tls, field, None)
    for field, path in given.items():
        if path is not None:
            yield field, str(path), False


def _written_paths(graph: Graph) -> Iterator[tuple[str, str, bool]]:
    if graph.frontend.batches.directory is not None:
        yield "frontend.batches.directory", graph.frontend.batches.directory, True
    if graph.worker.step_log is not None:
        yield "worker.step_log", graph.worker.step_log, True
    for name, role in graph.roles.present().items():
        url = role.kv.object.url
        if url.startswith("file:"):
            yield f"roles.{name}.kv.object.url", urlsplit(url).path, True


def _problem(path: str, options: RenderOptions, *, writes: bool) -> str | None:
    if not path.startswith("/"):
        return RELATIVE
    mount = options.mount_of(path)
    if mount is None:
        return _no_mount(path, writes=writes)
    if writes and not mount.is_writable:
        return f"is written, and {mount.kind}:{mount.name} cannot be; mount a claim or host directory at {mount.path}"
    return None


def _no_mount(path: str, *, writes: bool = False) -> str:
    example = "claim:NAME" if writes else "secret:NAME or claim:NAME"
    return f"no pod has it; mount its directory by --mount {PurePosixPath(path).parent}={example}"


def _is_loopback(value: str) -> bool:
    try:
        host = urlsplit(value).hostname if "://" in value else None
    except ValueError:
        return False
    return host in {"localhost", "::1"} or (host or "").startswith("127.")


def _leaves(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(node, list | tuple):
        for index, inner in enumerate(node):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, node


def weights_from_hub(graph: Graph) -> bool:
    """Whether pods download the model."""
    return graph.model != DEMO_MODEL and not is_local_model(graph.model)


def disk_directory(role: RoleSpec) -> str:
    """Give the directory of a role's disk tier."""
    return str(PurePosixPath(role.kv.disk.path).parent)
