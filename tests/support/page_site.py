"""The live page with snapshots of deployments that are not there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from penstock.frontend.watch.routes import _HEADERS, site_files

_INTERVAL_S = 0.2


class PageSite:
    """Serves the page's files, and the snapshot of the moment again and again."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.killed: list[str] = []
        """Paths that the page has posted to."""
        self.is_over = threading.Event()
        site, files = self, site_files()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/watch/events":
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.end_headers()
                    with suppress(ConnectionError):  # the page is closed
                        while not site.is_over.wait(_INTERVAL_S):
                            self.wfile.write(b"data: %b\n\n" % site.body)
                    return
                file = files.get("index.html" if self.path == "/" else self.path.rpartition("/")[2])
                if file is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                for name, value in _HEADERS.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", f"{file.content_type}; charset=utf-8")
                self.end_headers()
                self.wfile.write(file.content)

            def do_POST(self) -> None:
                site.killed.append(self.path)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the stream and the server, as a frontend that is gone; safe twice."""
        if not self.is_over.is_set():
            self.is_over.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


@contextmanager
def page_site(body: bytes) -> Iterator[PageSite]:
    """Serve the page until the block ends."""
    site = PageSite(body)
    try:
        yield site
    finally:
        site.end()
