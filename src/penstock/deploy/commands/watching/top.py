"""`penstock top`: a running deployment, once a second, until `q`."""

import sys

from penstock.deploy.commands.admin import ask, ask_stream
from penstock.deploy.commands.watching.plain import plain
from penstock.deploy.commands.watching.seen import Seen
from penstock.deploy.control.frontend_address import FrontendAddress

_SILENT_S = 10.0


def show_top(server: FrontendAddress, *, once: bool, as_json: bool) -> None:
    """Show a deployment until `q` is pressed; once as plain text where `once` says so, or where stdin or stdout is no terminal.

    Raises:
        ConfigError: the server is of another version.
        RequestError: the server has no page, or asks for the admin token.
        Unavailable: no server answers.
    """
    body = ask(server, "/watch/snapshot")
    if as_json:
        sys.stdout.write(body.decode() + "\n")
        return
    first = Seen.read(body)
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stdout.writelines(f"{text}\n" for text in plain(first))
        return
    from penstock.deploy.commands.watching.app import TopApp  # noqa: PLC0415 - takes 0.2 s

    TopApp(first, lambda: ask_stream(server, "/watch/events", timeout_s=_SILENT_S)).run()
