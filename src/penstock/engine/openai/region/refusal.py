"""Sends a server the TLS alert that its certificate is not trusted: asyncio closes the connection without the alert."""

import asyncio
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

_BYTES = 1 << 16
_PORT = 443


async def send_refusal(url: str, tls: ssl.SSLContext, timeout_s: float) -> None:
    """Begin a TLS handshake, and send the alert with which it fails. Nothing is raised where the server is not reached.

    Args:
        url: of the server.
        tls: does not trust it.
        timeout_s: longest time.
    """
    place = urlsplit(url)
    host = place.hostname or ""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, place.port or _PORT)
            try:
                await _fail(reader, writer, tls, host)
            finally:
                writer.close()


async def _fail(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext, host: str
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = tls.wrap_bio(incoming, outgoing, server_hostname=host)
    has_more = True
    while has_more:
        try:
            handshake.do_handshake()
            has_more = False  # the certificate is trusted by now
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            has_more = False
        writer.write(outgoing.read())
        await writer.drain()
        if has_more:
            content = await reader.read(_BYTES)
            has_more = bool(content)
            incoming.write(content)
