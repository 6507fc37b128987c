"""`penstock chat`: a conversation with a served model; it says which worker answered and what was cached."""

import argparse
import contextlib
import readline
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.cli.admin import ask, ask_stream
from penstock.cli.parser import Parser, add_frontend, frontend_of
from penstock.cli.text import printable, seconds
from penstock.core.errors import ConfigError, PenstockError, RequestError, Unavailable
from penstock.deploy.control.local_connector import FrontendAddress
from penstock.deploy.state import state_dir
from penstock.router.dispatch.state import Journey, LegPart


def add_chat(parser: Parser) -> None:
    """Add the arguments of `penstock chat`."""
    parser.description = (
        "Chat with a model of a running server. Answers are streamed, with the worker that gave them and what was cached."
        " See docs/operations.md."
    )
    parser.add_argument(
        "question", nargs="?", metavar="QUESTION", help="ask this alone, and end; without it, chat"
    )
    add_frontend(parser)
    parser.add_argument("--model", metavar="NAME", help="the model (default: the server's first)")
    parser.add_argument("--system", default="", metavar="TEXT", help="begin the conversation with this text")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer at most")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"--max-tokens: must be >= 1, got {options.max_tokens}")

    run_chat(frontend_of(options), options.model, options.system, options.max_tokens, options.question)
    return 0


HELP = """\
/new             begin a new conversation
/undo            take back the last question and its answer
/system TEXT     begin every conversation with this text; without TEXT, with none
/model [NAME]    ask another model; without NAME, list them
/max N           tokens of an answer at most
/quit            end, as Ctrl-D does; Ctrl-C stops an answer"""
_HISTORY_LINES = 1000
_SILENT_S = 120.0
_JOURNEY_TRIES = 20
"""Several frontend processes share a port, and one knows the request."""
_TRY_AGAIN_S = 0.05


class _Told(msgspec.Struct):
    journeys: list[Journey]


@dataclass(slots=True)
class ChatConversation:
    """What was said, and whom it is said to."""

    server: FrontendAddress
    model: str
    system: str = ""
    max_tokens: int | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, question: str, show: Callable[[str], None]) -> str:
        """Ask, show the answer as it comes, and give a line about where it came from. An answer that is stopped stays as it is.

        Raises:
            PenstockError: no answer; the question is taken back.
        """
        self.turns.append({"role": "user", "content": question})
        text, usage, answer_id, first_s = "", None, "", None
        began_s = time.perf_counter()
        events = self._events()
        try:
            with contextlib.closing(events):
                for event in events:
                    answer_id = event.get("id") or answer_id
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        delta = choice["delta"].get("content") or ""
                        if delta and first_s is None:
                            first_s = time.perf_counter() - began_s
                        text += delta
                        show(delta)
        except KeyboardInterrupt:
            text = text or "..."
        except PenstockError:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": text})
        return _about(self._journey(answer_id), usage, first_s)

    def undo(self) -> None:
        """Take back the last question and its answer."""
        del self.turns[-2:]

    def _events(self) -> Generator[dict[str, Any]]:
        """Yield the events of the answer's stream; raises PenstockError for one that fails."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *self.turns],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        path = "/v1/chat/completions"
        for data in ask_stream(self.server, path, body=msgspec.json.encode(body), timeout_s=_SILENT_S):
            if data == b"[DONE]":
                return
            event: dict[str, Any] = msgspec.json.decode(data)
            if "error" in event:
                raise PenstockError(event["error"]["message"])
            yield event

    def _journey(self, answer_id: str) -> Journey | None:
        """Ask for the answer's way; None where nobody tells."""
        if not answer_id:
            return None
        for _ in range(_JOURNEY_TRIES):
            try:
                told = msgspec.json.decode(
                    ask(self.server, f"/watch/requests/{quote(answer_id, safe='')}"), type=_Told
                )
                if told.journeys[0].outcome is not None:
                    return told.journeys[0]
            except RequestError as error:
                if (
                    error.http_status != HTTPStatus.NOT_FOUND
                ):  # such as 401: no token here, and the chat itself works
                    return None
            except (PenstockError, msgspec.DecodeError):
                return None
            time.sleep(_TRY_AGAIN_S)
        return None


def run_chat(
    server: FrontendAddress, model: str | None, system: str, max_tokens: int | None, question: str | None
) -> None:
    """Chat by the terminal; one question alone where it is given, or where stdin is no terminal and has it.

    Raises:
        RequestError: nobody serves the model, or the server refuses the only question.
        Unavailable: no server answers, or no worker there serves a model.
    """
    chat = ChatConversation(server, _chosen(server, model), system, max_tokens)
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None:
        _say(chat, question)
        return
    _write(f"{chat.model} at {server.url}; /help lists commands, Ctrl-D ends\n")
    with _history():
        while (line := _line(f"{chat.model}> ")) is not None:
            try:
                if line.startswith("/"):
                    if not _obey(chat, line):
                        return
                elif line:
                    _say(chat, line)
            except PenstockError as error:
                _write(f"{error.message}\n")


def _say(chat: ChatConversation, question: str) -> None:
    is_terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        _write(printable(text) if is_terminal else text)  # a model may write what a terminal obeys

    about = chat.answer(question, show)
    _write(f"\n\x1b[2m{about}\x1b[0m\n" if is_terminal else "\n")


def _obey(chat: ChatConversation, line: str) -> bool:
    """Run a slash command; False for the one that ends. Raises RequestError for what is no command."""
    command, _, value = line.partition(" ")
    value = value.strip()
    match command:
        case "/quit":
            return False
        case "/new":
            chat.turns.clear()
        case "/undo":
            chat.undo()
        case "/system":
            chat.system = value
            chat.turns.clear()
        case "/model" if value:
            chat.model = _chosen(chat.server, value)
        case "/model":
            _write("".join(f"{name}\n" for name in _models(chat.server)))
        case "/max" if value.isdecimal() and int(value) >= 1:
            chat.max_tokens = int(value)
        case "/max":
            raise RequestError(f"/max: must be a number >= 1, got {value!r}")
        case "/help":
            _write(f"{HELP}\n")
        case _:
            raise RequestError(f"there is no {command}; /help lists commands")
    return True


def _about(journey: Journey | None, usage: dict[str, Any] | None, first_s: float | None) -> str:
    """Say where an answer came from, and what it cost."""
    parts = []
    if journey is not None:
        legs = (
            f"{leg.worker} (prompt)" if leg.part is LegPart.PREFILL else leg.worker for leg in journey.legs
        )
        parts.append(f"by {', '.join(legs)}")
    if usage is not None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        parts += [
            f"{cached} of {usage['prompt_tokens']} prompt tokens cached",
            f"{usage['completion_tokens']} tokens",
        ]
    if first_s is not None:
        parts.append(f"first after {seconds(first_s)}")
    return " · ".join(parts)


def _models(server: FrontendAddress) -> list[str]:
    return [model["id"] for model in msgspec.json.decode(ask(server, "/v1/models"))["data"]]


def _chosen(server: FrontendAddress, wanted: str | None) -> str:
    """Give the model of this name, or the first; raises RequestError if there is none of it, Unavailable if there is none at all."""
    models = _models(server)
    if not models:
        raise Unavailable(
            f"{server}: no worker there serves a model now; try again when penstock ps shows a worker as ready"
        )
    if wanted is None:
        return models[0]
    if wanted not in models:
        raise RequestError(f"model {wanted!r}: the server has {', '.join(models)}")
    return wanted


def _line(prompt: str) -> str | None:
    """Read a line; None at the end. Ctrl-C gives up what was written of it."""
    try:
        return input(prompt).strip()
    except EOFError:
        _write("\n")
        return None
    except KeyboardInterrupt:
        _write("\n")
        return ""


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Have earlier lines by the arrow keys, those of earlier chats too; a file that cannot be written is left alone."""
    path = Path(state_dir("chat_history"))
    readline.set_history_length(_HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
