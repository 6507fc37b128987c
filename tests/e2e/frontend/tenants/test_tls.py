"""TLS over real sockets: HTTPS and nothing else, handshakes that stand still, and certificates that are renewed."""

import asyncio
import os
import ssl
from pathlib import Path

import pytest
from frontend_site import SPEAK, Answer, Site, chat, http, serving
from structlog.testing import capture_logs

from penstock.core.errors import ConfigError
from penstock.frontend.config import ServerTlsConfig
from penstock.frontend.http.server import ServerTls
from tests.support.certificates import make_authority, make_certificate

pytestmark = pytest.mark.needs("openssl")


def made(directory: Path, name: str) -> dict[str, str]:
    certificate = make_authority(directory, name)
    return {"certificate": str(certificate), "key": str(certificate.with_suffix(".key"))}


def trusting(files: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files["certificate"])
    context.check_hostname = False
    return context


async def ask(site: Site, files: dict[str, str], body: bytes) -> Answer:
    reader, writer = await site.connect(ssl=trusting(files))
    writer.write(http("POST", "/v1/chat/completions", body, "Connection: close"))
    raw = await reader.read()
    writer.close()
    return Answer(raw)


async def test_answers_and_streams_come_over_tls_and_plain_http_gets_nothing(tmp_path: Path) -> None:
    files = made(tmp_path, "one")
    async with serving(tls=files) as site:
        assert (await ask(site, files, chat())).status == 200
        stream = await ask(site, files, chat(stream=True))
        assert stream.body.rstrip().endswith(b"data: [DONE]") or b"data: [DONE]" in stream.body
        reader, writer = await site.connect()
        writer.write(http("GET", "/live"))
        assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await site.connect(ssl=ssl.create_default_context())
        old = trusting(files)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        _, writer = await site.connect(ssl=old)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.close()


async def test_handshakes_that_stand_still_are_ended_and_delay_nobody(tmp_path: Path) -> None:
    files = made(tmp_path, "one")
    async with serving(tls=files, receive={"timeout_s": 2.0}) as site:
        waiting = [await site.connect() for _ in range(50)]
        for _, writer in waiting[:25]:
            writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a client's hello
        assert (await ask(site, files, chat())).status == 200
        ends = await asyncio.gather(*(reader.read() for reader, _ in waiting), return_exceptions=True)
        assert all(end == b"" or isinstance(end, ConnectionError) for end in ends), "closed, all of them"
        for _, writer in waiting:
            writer.close()


async def test_a_renewed_certificate_is_used_by_new_connections_and_open_ones_go_on(tmp_path: Path) -> None:
    files, other = made(tmp_path, "one"), made(tmp_path, "two")
    go_on = asyncio.Event()

    async def waiting(request):
        await go_on.wait()
        async for delta in SPEAK(request):
            yield delta

    def replace(names: dict[str, str]) -> None:
        for kind, path in names.items():
            Path(path).rename(files[kind])
            os.utime(files[kind], ns=(0, len(path)))

    first = trusting(files)
    async with serving(waiting, tls=files) as site:
        watching = asyncio.create_task(site.server.watch())
        reader, writer = await site.connect(ssl=first)
        writer.write(http("POST", "/v1/chat/completions", chat(), "Connection: close"))
        await site.until(lambda: site.dispatcher.open_streams == 1)
        replace(other)
        second = trusting(files)

        async def renewed() -> bool:
            try:
                _, new = await site.connect(ssl=second)
            except ssl.SSLError:
                return False
            new.close()
            return True

        while not await renewed():  # noqa: ASYNC110 - the files are looked at now and then
            await asyncio.sleep(0.1)
        Path(files["certificate"]).write_text("nonsense")  # noqa: ASYNC240
        site.server._tls.reload()
        assert await renewed(), "a wrong file changes nothing"
        go_on.set()
        assert Answer(await reader.read()).status == 200, "the connection keeps its certificate"
        writer.close()
        watching.cancel()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files, other: {**files, "key": other["key"]}, "belong together"),
        (lambda files, _: {**files, "key": "/none"}, "No such file"),
        (lambda files, _: {**files, "certificate": files["key"]}, "must be PEM files"),
    ],
)
def test_files_that_do_not_fit_are_one_clear_error(tmp_path: Path, change, says: str) -> None:
    files = change(made(tmp_path, "one"), made(tmp_path, "two"))
    with pytest.raises(ConfigError, match=says) as wrong:
        ServerTls(ServerTlsConfig(**files))
    assert wrong.value.message.startswith("frontend.tls: certificate ")


@pytest.mark.parametrize(("days", "warned"), [("-1", True), ("2", False)])
def test_a_certificate_that_has_expired_is_logged(tmp_path: Path, days: str, warned: bool) -> None:
    made_by = make_certificate(tmp_path, "server", make_authority(tmp_path, "authority"), days=days)
    with capture_logs() as logs:
        ServerTls(ServerTlsConfig(certificate=made_by.certificate, key=made_by.key))
    assert [log["event"] for log in logs] == ["certificate_expired"] * warned
