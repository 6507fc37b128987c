"""The page's files, which come with the package: nothing is fetched from elsewhere."""

import hashlib
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Also what a defect of the page could not break: no code but its own, no other host, no frame around it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class SiteFile:
    """A file with its type and its ETag."""

    content: bytes
    content_type: str
    etag: str

    def answer(self, request: web.Request) -> web.Response:
        """Send it, or say that the browser's copy is current."""
        headers = {**_HEADERS, "ETag": self.etag}
        if request.headers.get("If-None-Match") == self.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=self.content, content_type=self.content_type, charset="utf-8", headers=headers
        )


def site_files() -> dict[str, SiteFile]:
    """Read all files, by name."""
    files = {}
    for entry in resources.files("penstock.frontend.watch").joinpath("site").iterdir():
        kind = entry.name.rpartition(".")[2]
        if kind in _TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            files[entry.name] = SiteFile(content, _TYPES[kind], etag)
    return files
