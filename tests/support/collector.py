"""A real OpenTelemetry collector, Rotel, which passes on by OTLP the spans that it understood."""

import gzip
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from tests.support.clients import ROOT
from tests.support.registries import free_port

_START_S = 60.0
_END_S = 30.0


class Collector:
    """Runs the collector within a block; after the block `spans` has all that came through it."""

    def __init__(self, folder: Path) -> None:
        self.spans: list[Any] = []
        self.services: dict[bytes, str] = {}
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._port = port
        self._log = folder / "collector.log"
        self._receiver = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        (program,) = (ROOT / "collector").glob("lib/python*/site-packages/rotel/rotel-agent")
        self._command = [
            str(program), "start", "--log-file", str(folder / "rotel.log"), "--pid-file", str(folder / "rotel.pid"),
            "--otlp-http-endpoint", f"127.0.0.1:{port}", "--otlp-grpc-endpoint", "127.0.0.1:0", "--exporter", "otlp",
            "--otlp-exporter-protocol", "http", "--otlp-exporter-compression", "none",
            "--otlp-exporter-endpoint", f"http://127.0.0.1:{self._receiver.server_port}",
        ]  # fmt: skip

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.services[span.span_id] = attributes["service.name"]
                    self.spans.append(span)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def __enter__(self) -> Self:
        threading.Thread(target=self._receiver.serve_forever, daemon=True).start()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        give_up = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(f"the collector does not listen: {self._log.read_text()[-3000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()  # it sends what it holds
        try:
            self._process.wait(_END_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._receiver.shutdown()
            self._receiver.server_close()


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler
