"""The load generator of `python -m benchmarks frontend` against a small server: what counts as an answer, and how many events it had."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.frontend.load import Load, Prompts
from benchmarks.frontend.servers import Server

pytestmark = pytest.mark.needs("cc")

EVENT = b'data: {"choices": [{"delta": {"content": "a\\n\\nb"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Handler(BaseHTTPRequestHandler):
    """Answers with `body`, in chunks of `piece` bytes where it is a stream."""

    protocol_version = "HTTP/1.1"
    status, body, piece = 200, b"", 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.send_header("Content-Type", "text/event-stream" if self.piece else "application/json")
        if not self.piece:
            self.send_header("Content-Length", str(len(self.body)))
            self.end_headers()
            self.wfile.write(self.body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(0, len(self.body), self.piece):
            part = self.body[at : at + self.piece]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    for name in ("status", "body", "piece"):
        monkeypatch.setattr(Handler, name, getattr(Handler, name))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield Server("other", http.server_port, "tiny", pid=1)
        http.shutdown()


@pytest.mark.parametrize("piece", [1, 7, 100, 10_000])
def test_events_of_streams_are_counted_however_they_are_cut(
    server: Server, tmp_path: Path, piece: int
) -> None:
    Handler.body, Handler.piece = EVENT * 5 + DONE, piece
    done = Load(tmp_path).run(server, Prompts(5, words=3), 2, 6)
    assert (done.answers, done.failures, done.events) == (6, 0, 36)


def test_a_stream_without_its_end_and_a_refusal_are_failures(server: Server, tmp_path: Path) -> None:
    load = Load(tmp_path)
    Handler.body, Handler.piece = EVENT * 5, 50
    done = load.run(server, Prompts(5, words=3), 2, 4)
    assert (done.answers, done.failures, done.failure) == (0, 4, "a stream without [DONE] (status 200)")
    Handler.body, Handler.piece, Handler.status = b"{}", 0, 503
    done = load.run(server, Prompts(5, words=3), 2, 4)
    assert (done.answers, done.failures, done.failure) == (0, 4, "refused (status 503)")
