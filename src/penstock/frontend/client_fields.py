"""The client's names of fields, for errors found after its body was translated into the frontend's own request."""

import re
from types import TracebackType
from typing import Self

import msgspec

from penstock.core.errors import RequestError
from penstock.core.wire import Wire

_PATH = re.compile(r"[A-Za-z_][\w.\[\]]*(?=: )")
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_CONTENT = ".content"


class Origin(Wire, frozen=True):
    """Where a translated message comes from: its field in the client's body, its content's field, and whether the content has the same parts."""

    field: str
    content: str
    has_parts: bool = False


class ClientFields(Wire, frozen=True):
    """A context that renames fields in a `RequestError` raised inside it to the client's names.

    Attributes:
        names: client's field name by our field name; a path after the name is kept.
        messages: the origin of each message; empty where the client sent `messages` itself.
        tools: the client's name of a tool's `parameters`, where its tools have no `function` object; empty otherwise.
    """

    names: dict[str, str] = msgspec.field(default_factory=dict)
    messages: tuple[Origin, ...] = ()
    tools: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            self.rename(error)

    def rename(self, error: RequestError) -> None:
        """Rename the field in an error's `param` and text. Call it once: a client's name may be another field's name here."""
        if error.param is None:
            return
        error.param = self.of(error.param)
        if path := _PATH.match(error.message):
            error.message = self.of(path[0]) + error.message[path.end() :]

    def of(self, path: str) -> str:
        """Give the client's name for a path of fields."""
        if self.messages and (found := _MESSAGE.fullmatch(path)) and int(found[1]) < len(self.messages):
            origin, rest = self.messages[int(found[1])], found[2]
            if not rest.startswith(_CONTENT):
                return origin.field + rest if origin.has_parts else origin.field
            return origin.content + (rest[len(_CONTENT) :] if origin.has_parts else "")
        if self.tools and path.startswith("tools["):
            return path.replace(".function.parameters", f".{self.tools}").replace(".function", "")
        ours = path
        while ours not in self.names:
            ours = ours[: max(ours.rfind("."), ours.rfind("["), 0)]
            if not ours:
                return path
        return self.names[ours] + path[len(ours) :]

    def after(self, instructions: int, history: int) -> "ClientFields":
        """Give the names for a body in which `history` stored messages follow the first `instructions` messages."""
        head, said = self.messages[:instructions], self.messages[instructions:]
        stored = Origin(field="previous_response_id", content="previous_response_id")
        return ClientFields(
            names=self.names, messages=(*head, *(stored for _ in range(history)), *said), tools=self.tools
        )


SAME = ClientFields()
"""For bodies whose field names are our own."""
