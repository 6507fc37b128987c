"""A request's tokens on their direct way: from its worker's frames to its client, by a rule of the reader's."""

from penstock.core.ids import RequestId
from penstock.core.types.requests import Delta
from penstock.router.dispatch.attempt import WorkerAttempt
from penstock.router.dispatch.progress import Progress
from penstock.seams import Connection, DirectSink, DirectStream, Hold, Interrupt


class DirectTokens:
    """Opens and closes one request's direct stream, and keeps its progress right. One event loop owns it."""

    def __init__(self, request_id: RequestId, interrupted: Interrupt) -> None:
        """Begin closed; `interrupted` is called once it is closed because the client has to be waited for, or is gone."""
        self.sink: DirectSink | None = None
        """Has the rule; None: there is none."""
        self._request_id = request_id
        self._interrupted = interrupted
        self._connection: Connection | None = None
        self._progress: Progress | None = None

    def open(self, attempt: WorkerAttempt | None, progress: Progress) -> None:
        """Take the way if it is there: the reader has all tokens so far, and the attempt is beyond its early steps."""
        if self.sink is None or attempt is None or attempt.early_steps or self._connection is not None:
            return
        rule = self.sink.open(self._interrupt)
        if rule is None:
            return
        connection, (stream, client) = attempt.connection, rule
        if connection.open_direct(self._request_id, stream, client):
            self._connection, self._progress = connection, progress
            progress.direct = _Counted(stream)

    def close(self) -> None:
        """Leave the way: what came by it counts, and what came and was not written is unread. Safe twice."""
        connection, self._connection = self._connection, None
        progress, self._progress = self._progress, None
        if connection is None or progress is None:
            return
        progress.direct = None
        taken = connection.close_direct(self._request_id)
        if taken is None:
            return
        progress.wrote(taken.written)
        if taken.ungranted:
            connection.grant(self._request_id, taken.ungranted)
        if taken.waiting:
            progress.add(Delta(request_id=self._request_id, token_ids=taken.waiting))

    def _interrupt(self, why: Hold | Exception) -> None:
        self.close()
        self._interrupted(why)


class _Counted:
    """The tokens of a direct stream since now."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: DirectStream) -> None:
        self._stream = stream
        self._before = stream.tokens

    @property
    def tokens(self) -> int:
        return self._stream.tokens - self._before
