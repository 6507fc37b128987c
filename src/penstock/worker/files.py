"""The files of a model card, by content hash."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from penstock.core.log import get_logger
from penstock.core.types.instances import CardFile

_log = get_logger()


class ModelFiles:
    """Reads the files that a card lists, and no others."""

    def __init__(self, directory: Path, files: Iterable[CardFile], given: Iterable[bytes] = ()) -> None:
        """Take a card's files.

        Args:
            directory: of the model.
            files: of the card.
            given: contents of those that are not in the directory.
        """
        self._given = {hashlib.sha256(content).hexdigest(): content for content in given}
        self._paths = {file.sha256: directory / file.name for file in files}

    def read(self, sha256: str) -> bytes | None:
        """Return a file's content; None if the card has no file of this hash, or the file has changed since."""
        path = self._paths.get(sha256)
        if path is None:
            return None
        if sha256 in self._given:
            return self._given[sha256]
        try:
            content = path.read_bytes()
        except OSError as error:
            _log.error("model_file_unreadable", path=str(path), error=str(error))
            return None
        if hashlib.sha256(content).hexdigest() != sha256:
            _log.error("model_file_changed", path=str(path), fix="restart the worker to serve the new model")
            return None
        return content
