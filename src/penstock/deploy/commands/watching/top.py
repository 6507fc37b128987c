"""`penstock top`: a running deployment, once a second, until `q`."""

import sys

from penstock.deploy.commands.admin import ask, ask_stream, base_of
from penstock.deploy.commands.watching.plain import plain
from penstock.deploy.commands.watching.seen import Seen

_SILENT_S = 10.0


def show_top(url: str, *, once: bool, as_json: bool) -> None:
    """Show a deployment until `q` is pressed; once as plain text where `once` says so, or where stdin or stdout is no terminal.

    Raises:
        ConfigError: `url` is no URL, or of another version.
        RequestError: the server has no page, or asks for the admin token.
        Unavailable: no server answers.
    """
    base = base_of(url)
    body = ask(base, "/watch/snapshot")
    if as_json:
        sys.stdout.write(body.decode() + "\n")
        return
    first = Seen.read(body)
    if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        sys.stdout.writelines(f"{text}\n" for text in plain(first))
        return
    from penstock.deploy.commands.watching.app import TopApp  # noqa: PLC0415 - takes 0.2 s

    TopApp(first, lambda: ask_stream(base, "/watch/events", timeout_s=_SILENT_S)).run()
