"""An HTTP server on a thread of its own, for commands that ask one."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Answers:
    """What a server answers, and what it was asked.

    Attributes:
        body: gives the answer to a path: bytes, or what becomes JSON.
        status: of all answers.
        headers: of all answers.
        asked: path and `Authorization` of each request.
    """

    body: Callable[[str], Any] = lambda _path: b"ok"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def answering(answers: Answers, certificate: tuple[str, str] | None = None) -> Iterator[Answers]:
    """Serve in the block; with a certificate and its key by TLS."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.asked.append((self.path, self.headers.get("Authorization", "")))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made = answers.body(self.path)
            body = made if isinstance(made, bytes) else json.dumps(made).encode()
            self.send_response(answers.status)
            for name, value in {"Content-Length": str(len(body)), **answers.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - its name in the standard library

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = False

        def handle_error(self, *_: object) -> None:
            """Say nothing of peers that speak otherwise."""

    with Server(("127.0.0.1", 0), Handler) as server:
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(*certificate)
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        answers.url = f"{scheme}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield answers
        finally:
            server.shutdown()
            thread.join()
