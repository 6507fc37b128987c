"""Refusals of the API server, as `Status` objects."""

from typing import Any


class Refused(Exception):  # noqa: N818 - an answer
    """An answer with an error's status."""

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> dict[str, Any]:
        """Give the `Status` object."""
        status: dict[str, Any] = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        }  # fmt: skip
        if self.details is not None:
            status["details"] = self.details
        return status


def not_found(plural: str, name: str) -> Refused:
    return Refused(404, "NotFound", f'{plural} "{name}" not found', {"name": name, "kind": plural})


def exists(plural: str, name: str) -> Refused:
    return Refused(409, "AlreadyExists", f'{plural} "{name}" already exists', {"name": name, "kind": plural})


def stale(plural: str, name: str) -> Refused:
    return Refused(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified; please apply your changes to the'
        " latest version and try again",
        {"name": name, "kind": plural},
    )


def expired(revision: int, oldest: int) -> Refused:
    return Refused(410, "Expired", f"too old resource version: {revision} ({oldest})")


def invalid(kind: str, name: str, causes: list[str]) -> Refused:
    return Refused(
        422,
        "Invalid",
        f'{kind} "{name}" is invalid: {"; ".join(causes)}',
        {"name": name, "kind": kind, "causes": [{"message": cause} for cause in causes]},
    )
