"""Names of a body's fields as its client sent them, for errors that are found once the body is the frontend's own request."""

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
    """Where a message comes from: its field in the body, that of its content, and whether both have the same parts."""

    field: str
    content: str
    has_parts: bool = False


class ClientFields(Wire, frozen=True):
    """Gives errors of its block the names that the client used.

    Attributes:
        names: the client's names, by ours; what comes after a name stays.
        messages: the origin of each message, where they are no messages of a chat.
        tools: whether the client's tools have no `function` inside, and what their `parameters` are called.
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
        """Change an error's field and text; once, as one field may have another's name."""
        if error.param is None:
            return
        error.param = self.of(error.param)
        if path := _PATH.match(error.message):
            error.message = self.of(path[0]) + error.message[path.end() :]

    def of(self, path: str) -> str:
        """Give the client's name of a field."""
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
        """Give them where so many messages of a stored answer stand behind the instructions."""
        head, said = self.messages[:instructions], self.messages[instructions:]
        stored = Origin(field="previous_response_id", content="previous_response_id")
        return ClientFields(
            names=self.names, messages=(*head, *(stored for _ in range(history)), *said), tools=self.tools
        )


SAME = ClientFields()
"""Of a body whose fields are the request's own."""
