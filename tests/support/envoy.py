"""A real Envoy before an endpoint picker, with the processing modes of the inference extension."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.clients import ROOT
from tests.support.registries import free_port

"""Installed by `make test` beside the clients of the API."""
_START_S = 60.0
_TYPE = "type.googleapis.com/envoy."


def configuration(
    port: int, admin: int, picker: int, servers: Sequence[int], modes: dict[str, str]
) -> dict[str, Any]:
    """Make Envoy's configuration: every request asks the picker, and goes to the endpoint that it names."""
    processor = {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": _TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "processing_mode": modes,
            "message_timeout": "10s",
            "failure_mode_allow": False,
            "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}, "receiving_namespaces": {"untyped": ["envoy.lb"]}},
        },
    }  # fmt: skip
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": _TYPE + "extensions.filters.http.router.v3.Router"},
    }
    manager = {
        "@type": _TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_filters": [processor, router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
            {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s"}}]}]},
    }  # fmt: skip
    override = {
        "@type": _TYPE + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}],
        "fallback_policy": {"policies": [{"typed_extension_config": {
            "name": "envoy.load_balancing_policies.round_robin",
            "typed_config": {"@type": _TYPE + "extensions.load_balancing_policies.round_robin.v3.RoundRobin"}}}]},
    }  # fmt: skip
    http2 = {_TYPE.split("/")[1] + "extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": _TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}}}}  # fmt: skip
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [{"name": "in", "address": _address(port), "filter_chains": [
                {"filters": [{"name": "http", "typed_config": manager}]}]}],
            "clusters": [
                {"name": "picker", "connect_timeout": "5s", "typed_extension_protocol_options": http2,
                 "load_assignment": _assignment("picker", [picker])},
                {"name": "pool", "connect_timeout": "5s", "load_assignment": _assignment("pool", servers),
                 "load_balancing_policy": {"policies": [{"typed_extension_config": {
                     "name": "envoy.load_balancing_policies.override_host", "typed_config": override}}]}},
            ],
        },
    }  # fmt: skip


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _assignment(name: str, ports: Sequence[int]) -> dict[str, Any]:
    return {
        "cluster_name": name,
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in ports]}],
    }


DUPLEX = {
    "request_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
    "response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND",
}  # fmt: skip
"""Modes that the inference extension asks for."""
BUFFERED = {
    "request_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "response_header_mode": "SEND",
    "response_body_mode": "STREAMED",
}


@contextlib.asynccontextmanager
async def envoy(
    tmp_path: Path, picker: int, servers: Sequence[int], modes: dict[str, str] = DUPLEX
) -> AsyncIterator[str]:
    """Run Envoy until the context ends, and give its URL."""
    (program,) = (ROOT / "envoy").glob("lib/python*/site-packages/envoy/_bin/envoy")
    port, admin = free_port(), free_port()
    file = tmp_path / f"envoy-{port}.json"
    file.write_text(json.dumps(configuration(port, admin, picker, servers, modes)))
    log = (tmp_path / f"envoy-{port}.log").open("w")
    process = await asyncio.create_subprocess_exec(
        program, "-c", file, "--concurrency", "1", "--base-id", str(port), "-l", "warning", stdout=log, stderr=log
    )  # fmt: skip
    try:
        await _wait(port, process, Path(log.name))
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        log.close()


async def _wait(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_START_S):
        while process.returncode is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)
    raise AssertionError(f"Envoy ended: {log.read_text()[-3000:]}")  # noqa: ASYNC240 - the end of a test
