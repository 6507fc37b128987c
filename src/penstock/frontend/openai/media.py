"""Images, audio and video in chat messages: data URLs, base64, and URLs that the frontend may be allowed to fetch."""

import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.wire import Wire

PART_TYPES = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}
"""Types of content parts that hold media, and their modality."""
TEXT_TYPES = ("text", "refusal")
_QUOTED = 80


class MediaUrl(msgspec.Struct, kw_only=True):
    url: str
    detail: str | None = None  # accepted, no effect: the model's processor chooses the size


class InputAudio(msgspec.Struct, kw_only=True):
    data: str
    format: str


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    audio_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    input_audio: InputAudio | None = None

    @property
    def words(self) -> str | None:
        """The text of a part without media; None for one with media."""
        if self.type not in TEXT_TYPES:
            return None
        return (self.refusal if self.type == "refusal" else self.text) or ""


class MediaPart(Wire, frozen=True):
    """One item of a message: its bytes, or the http(s) URL to fetch them from. `param` is its field in the body."""

    modality: str
    param: str
    data: bytes = b""
    url: str | None = None


def check_part(part: ContentPart, where: str) -> None:
    """Check a content part's type, and that what the type names is there.

    Raises:
        RequestError: it is not.
    """
    if part.type not in TEXT_TYPES and part.type not in PART_TYPES:
        raise RequestError(
            f"{where}.type: {part.type!r} is not supported; send parts of type 'text', or of"
            f" {', '.join(PART_TYPES)} where the model takes them",
            param=f"{where}.type",
        )
    if getattr(part, part.type) is None:
        raise RequestError(f"{where}.{part.type}: required, but missing", param=f"{where}.{part.type}")


def media_part(part: ContentPart, where: str) -> MediaPart:
    """Decode a checked part that holds media.

    Raises:
        RequestError: a broken data URL or base64, or a URL of another kind than http, https and data.
    """
    modality, param = PART_TYPES[part.type], f"{where}.{part.type}"
    content: Any = getattr(part, part.type)
    if isinstance(content, InputAudio):
        return MediaPart(modality=modality, param=param, data=_decoded(content.data, param, f"{param}.data"))
    url = content.url if isinstance(content, MediaUrl) else content
    scheme = url[:8].partition(":")[0].lower()
    if scheme in {"http", "https"}:
        return MediaPart(modality=modality, param=param, url=url)
    if scheme != "data":
        raise RequestError(
            f"{param}.url: must be a data URL such as data:{modality}/...;base64,..., or an http(s) URL, got {url[:_QUOTED]!r}",
            param=param,
        )
    head, comma, body = url[len("data:") :].partition(",")
    kind, *options = head.lower().split(";")
    if not comma or "base64" not in options:
        raise RequestError(
            f"{param}.url: must be data:{modality}/...;base64,..., got {url[:_QUOTED]!r} without base64 data",
            param=param,
        )
    if not kind.startswith(f"{modality}/"):
        raise RequestError(
            f"{param}.url: its data must be of a type {modality}/..., got {kind[:_QUOTED]!r}; name the file's own type",
            param=param,
        )
    return MediaPart(modality=modality, param=param, data=_decoded(body, param, f"{param}.url"))


def _decoded(text: str, param: str, name: str) -> bytes:
    try:
        data = binascii.a2b_base64(text.encode(), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(
            f"{name}: not base64: {error}; encode the file with padding and without spaces", param=param
        ) from error
    if not data:
        raise RequestError(f"{name}: has no data; send the file's bytes in base64", param=param)
    return data


def placeholders(modalities: Sequence[str], text: str, placeholder_of: dict[str, str]) -> str:
    """Put before a text the placeholders of the media that it does not place itself, one a line, as vLLM does.

    Args:
        modalities: of the message's media, in order.
        text: of the message.
        placeholder_of: by modality; `{n}` in one stands for the item's number among those of its modality.
    """
    counts: dict[str, int] = {}
    lines: list[str] = []
    left = text
    for modality in modalities:
        counts[modality] = counts.get(modality, 0) + 1
        mark = placeholder_of[modality].replace("{n}", str(counts[modality]))
        if mark and mark in left:
            left = left.replace(mark, "", 1)
        else:
            lines.append(mark)
    return "\n".join([*lines, text])
