"""Runs batches in the gaps between other requests: takes batches that no other process runs, and continues unfinished ones."""

import asyncio
import math
import os
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError, RequestError
from penstock.core.json_text import encode_json
from penstock.core.log import cause, get_logger
from penstock.frontend.apis.chat import CHAT, COMPLETIONS
from penstock.frontend.apis.responses_answer import RESPONSES
from penstock.frontend.batch_store import (
    ENDED,
    BatchError,
    BatchErrors,
    BatchLine,
    BatchRecord,
    BatchStatus,
    BatchStore,
    check_input,
    digest,
    new_id,
    read_done,
    read_lines,
)
from penstock.frontend.config import BatchesConfig
from penstock.frontend.errors import error_answer
from penstock.frontend.frontend import Frontend
from penstock.frontend.limits.headers import RequestOptions
from penstock.frontend.limits.tenants import PRIORITY_MAX

_GAP_LOOK_S = 0.05
_AT_ONCE_BUSY = 1
"""Requests of batches that run while the process has other requests."""


class BatchGaps:
    """Counts the requests of all batches of a process. One event loop owns it."""

    def __init__(
        self, config: BatchesConfig, inflight: Callable[[], int], is_served: Callable[[], bool]
    ) -> None:
        """Set limits.

        Args:
            config: gives how many run at once.
            inflight: counts the requests in flight of this process, those of batches included.
            is_served: whether any model can be asked now.
        """
        self._config = config
        self._inflight = inflight
        self._is_served = is_served
        self.running = 0
        self.admitted = 0
        """Of `running`, those that `inflight` counts."""

    async def wait(self) -> None:
        """Wait until one more request may start, and count it until `leave`."""
        while not self._is_served() or self.running >= self._limit():  # noqa: ASYNC110 - admission has no event
            await asyncio.sleep(_GAP_LOOK_S)
        self.running += 1

    def leave(self) -> None:
        self.running -= 1

    def _limit(self) -> int:
        others = self._inflight() - self.admitted
        return _AT_ONCE_BUSY if others > 0 else self._config.at_once


EMBEDDINGS = "/v1/embeddings"
_DIALECTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS, "/v1/responses": RESPONSES}
ENDPOINTS = (*_DIALECTS, EMBEDDINGS)
_LATER = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_TRIES_MAX = 12
_PAUSE_S = (0.5, 60.0)
_log = get_logger()


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineFailure(msgspec.Struct):
    code: str
    message: str


class OutputLine(msgspec.Struct, kw_only=True):
    """A line of a batch's output, or of its errors."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineFailure | None = None


async def answer_line(
    frontend: Frontend, gaps: BatchGaps, line: BatchLine, options: RequestOptions
) -> tuple[bool, bytes]:
    """Answer a request; a server that is busy, or has lost its worker, is asked again up to 12 times, within 8 minutes.

    Returns:
        whether it was answered, and the line to write.
    """
    name = ""
    for tried in range(1, _TRIES_MAX + 1):
        try:
            name, body = await _answer(frontend, gaps, line, options)
        except PenstockError as error:
            if error.http_status in _LATER and tried < _TRIES_MAX:
                low, high = _PAUSE_S
                await asyncio.sleep(min(max(error.retry_after_s or low, low * 2 ** (tried - 1)), high))
                continue
            return False, _line(line, error.http_status, name, encode_json(error_answer(error)))
        except Exception:  # noqa: BLE001 - one request must not end its batch
            _log.exception("batch_request_failed", custom_id=line.custom_id)
            failure = PenstockError("the server failed on this request; its log says more")
            return False, _line(line, failure.http_status, name, encode_json(error_answer(failure)))
        return True, _line(line, HTTPStatus.OK, name, body)
    raise AssertionError("the last try returns")


def expired_line(line: BatchLine) -> bytes:
    """Give the error line of a request that had not run by the end of the batch's window."""
    failure = LineFailure(
        "batch_expired", "the batch's completion window ended before this request was answered"
    )
    return (
        encode_json(
            OutputLine(id=new_id("batch_req_"), custom_id=line.custom_id, response=None, error=failure)
        )
        + b"\n"
    )


async def _answer(
    frontend: Frontend, gaps: BatchGaps, line: BatchLine, options: RequestOptions
) -> tuple[str, bytes]:
    """Give the id and the body of the answer."""
    body = [bytes(line.body)]
    with frontend.arrive() as slot:
        frontend.admit(slot)
        gaps.admitted += 1
        try:
            with slot.limit():
                if line.url == EMBEDDINGS:
                    embeddings = await frontend.embed(body, slot, options)
                    await embeddings.completion.run()
                    return embeddings.prepared.id, await embeddings.completion.body()
                pending = await frontend.generate(body, slot, options, _DIALECTS[line.url])
                if pending.stream:
                    raise RequestError("a batch does not stream; leave it out", field="stream")
                answer = pending.whole_answer()
                await pending.completion.run(answer.take)
                return pending.prepared.id, await pending.body(answer)
        finally:
            gaps.admitted -= 1


def _line(line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    response = LineResponse(status, request_id, msgspec.Raw(body))
    return (
        encode_json(OutputLine(id=new_id("batch_req_"), custom_id=line.custom_id, response=response)) + b"\n"
    )


_LOOK_S = 0.25
_SAVES_EVERY = 4  # looks
_READ_BYTES = 4 << 20
_UNWRITTEN_BYTES_MAX = 8 << 20


class BatchRun:
    """Answers the requests of one batch, whose lock the caller holds. One task owns it.

    Answers are written some times a second: those that a killed process had not written are made again.
    """

    def __init__(
        self,
        frontend: Frontend,
        gaps: BatchGaps,
        store: BatchStore,
        record: BatchRecord,
        gives_way: Callable[[], bool],
    ) -> None:
        """Take a batch; `gives_way` tells after each request's start whether another tenant's batch has its turn now."""
        self._gives_way = gives_way
        self._has_given_way = False
        self._frontend = frontend
        self._gaps = gaps
        self._store = store
        self._record = record
        self._batch = record.batch
        self._input = store.data(record.batch.input_file_id)
        self._output, self._errors = store.data(record.output_id), store.data(record.errors_id)
        self._options = RequestOptions(
            tenant=record.tenant, cache_salt=record.cache_salt, priority=-PRIORITY_MAX, priority_max=0
        )
        self._loop, self._ends_s = asyncio.get_running_loop(), math.inf
        self._done: set[bytes] = set()
        self._unwritten: dict[Path, list[bytes]] = {self._output: [], self._errors: []}
        self._unwritten_bytes = self._output_bytes = 0

    async def run(self) -> None:
        """Check the input if that was not done, answer what is not answered, and end the batch.

        A batch that gives way stays in progress, and may be run again.

        Raises:
            OSError: the disk failed.
        """
        batch = self._batch
        if batch.status is BatchStatus.VALIDATING and not await self._validate():
            return
        await self._resume()
        if batch.status is BatchStatus.IN_PROGRESS:
            await self._answer_all()
            ended_early = batch.cancelled_at, batch.expired_at, batch.failed_at
            if self._has_given_way and not any(ended_early):
                await self._save()
                return
            batch.status, batch.finalizing_at = BatchStatus.FINALIZING, int(wall_time_s())
            await self._save()
        await asyncio.to_thread(self._finish)

    async def _validate(self) -> bool:
        batch, config = self._batch, self._frontend.config
        total, errors = await asyncio.to_thread(
            check_input,
            self._input,
            batch.endpoint,
            requests_max=config.batches.requests_max,
            line_bytes_max=config.body_bytes_max,
        )
        now = int(wall_time_s())
        if errors:
            batch.errors = BatchErrors(data=errors)
            batch.status, batch.failed_at = BatchStatus.FAILED, now
        else:
            batch.status, batch.in_progress_at = BatchStatus.IN_PROGRESS, now
            batch.request_counts.total = total
        await self._save()
        return not errors

    async def _resume(self) -> None:
        """Read what was answered before."""
        answered = await asyncio.to_thread(read_done, self._output)
        failed = await asyncio.to_thread(read_done, self._errors)
        self._done = answered | failed
        counts = self._batch.request_counts
        counts.completed, counts.failed = len(answered), len(failed)
        self._output_bytes = self._output.stat().st_size if self._output.exists() else 0

    # ---- answering ------------------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        """Answer until all is answered, or the batch is cancelled or expires."""
        looks = 0
        # From here on the clock may be set: what is left of the window counts.
        self._ends_s = self._loop.time() + self._batch.expires_at - wall_time_s()
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(self._answer_lines())
            while not answering.done():
                await asyncio.wait([answering], timeout=_LOOK_S)
                await self._write()
                if not answering.done() and await asyncio.to_thread(self._is_over):
                    answering.cancel()
                    await asyncio.wait([answering])
                looks += 1
                if not looks % _SAVES_EVERY:
                    await self._save()
        await self._write()
        if self._batch.expired_at is not None:
            await asyncio.to_thread(self._expire_rest)

    async def _answer_lines(self) -> None:
        lines = read_lines(self._input, self._done, self._frontend.config.body_bytes_max)
        async with asyncio.TaskGroup() as group:
            while some := await asyncio.to_thread(_some, lines):
                for line in some:
                    while self._unwritten_bytes > _UNWRITTEN_BYTES_MAX:  # noqa: ASYNC110 - a full disk, mostly
                        await asyncio.sleep(_LOOK_S / 10)
                    await self._gaps.wait()
                    task = group.create_task(self._answer(line))
                    task.add_done_callback(lambda _: self._gaps.leave())  # also of one that never began
                    if self._gives_way():
                        self._has_given_way = True
                        return

    async def _answer(self, line: BatchLine) -> None:
        is_answered, written = await answer_line(self._frontend, self._gaps, line, self._options)
        self._frontend.metrics.batch_request(is_answered=is_answered)
        counts = self._batch.request_counts
        if is_answered:
            counts.completed += 1
            self._output_bytes += len(written)
        else:
            counts.failed += 1
        self._unwritten[self._output if is_answered else self._errors].append(written)
        self._unwritten_bytes += len(written)
        self._done.add(digest(line.custom_id))

    async def _write(self) -> None:
        """Append what was answered; only `_answer_all` calls it."""
        for path, lines in self._unwritten.items():
            if lines:
                data = b"".join(lines)
                lines.clear()
                await asyncio.to_thread(_append, path, data)
                self._unwritten_bytes -= len(data)

    def _is_over(self) -> bool:
        """Tell whether the batch ends before all is answered, and note why."""
        batch, now = self._batch, int(wall_time_s())
        most = self._store.config.file_bytes_max
        if self._store.is_to_cancel(batch.id):
            batch.cancelling_at = batch.cancelled_at = now
        elif self._loop.time() >= self._ends_s:
            batch.expired_at = now
        elif self._output_bytes > most:
            text = (
                f"the answers have {self._output_bytes} bytes, and file_bytes_max is {most}; split the file"
            )
            batch.errors = BatchErrors(data=[BatchError(code="output_too_large", message=text)])
            batch.failed_at = now
        else:
            return False
        return True

    # ---- its end --------------------------------------------------------------------------------------

    def _expire_rest(self) -> None:
        """Write an error line for every request that was not answered."""
        with self._errors.open("ab") as file:
            for line in read_lines(self._input, self._done, self._frontend.config.body_bytes_max):
                file.write(expired_line(line))
                self._batch.request_counts.failed += 1

    def _finish(self) -> None:
        """Make files of the output and the errors, and end the batch. It may be done again after a crash."""
        batch = self._batch
        batch.output_file_id = self._keep(self._record.output_id, "output")
        batch.error_file_id = self._keep(self._record.errors_id, "error")
        if batch.failed_at is not None:
            batch.status = BatchStatus.FAILED
        elif batch.cancelled_at is not None:
            batch.status = BatchStatus.CANCELLED
        elif batch.expired_at is not None:
            batch.status = BatchStatus.EXPIRED
        else:
            batch.status, batch.completed_at = BatchStatus.COMPLETED, int(wall_time_s())
        self._store.put(self._record)

    def _keep(self, file_id: str, kind: str) -> str | None:
        """Make a file of what was written; None where nothing was."""
        path = self._store.data(file_id)
        if not path.exists() or not path.stat().st_size:
            return None
        self._store.keep(file_id, filename=f"{self._batch.id}_{kind}.jsonl", purpose="batch_output")
        return file_id

    async def _save(self) -> None:
        await asyncio.to_thread(self._store.put, self._record)


def _some(lines: Iterator[BatchLine]) -> list[BatchLine]:
    """Read on until there are some MiB, or the end."""
    some, size_bytes = [], 0
    for line in lines:
        some.append(line)
        size_bytes += len(bytes(line.body))
        if size_bytes >= _READ_BYTES:
            break
    return some


def _append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        while data:
            data = data[file.write(data) :]


_SCAN_S = 1.0
_CLEAN_S = 600.0
_TENANTS_AT_ONCE = 16
"""Tenants whose batches run at once here. A tenant's batches run one after another; one batch alone may use all of `at_once`."""
_TURN_S = 60.0
"""How long a batch runs before it gives way, where tenants beyond those at once wait."""
_DISK_PAUSE_S = 10.0


class BatchRunner:
    """Runs batches until it is cancelled. One event loop owns it."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._config = frontend.config.batches
        self._gaps = BatchGaps(
            self._config, lambda: frontend.admission.inflight, lambda: frontend.unhealthy() is None
        )
        self._running: dict[str, str] = {}
        """Running batch by its tenant's folder."""
        self._last_tenant = ""
        self._tenants_wait = False
        self._began_s = 0.0
        self._unreadable: set[str] = set()

    async def run(self) -> None:
        """Look for batches and run them, for ever; return at once where batches are off."""
        if self._config.directory is None:
            return
        loop = asyncio.get_running_loop()
        clean_at_s = loop.time()
        self._began_s = wall_time_s() - clean_at_s
        async with asyncio.TaskGroup() as group:
            while True:
                for store, record, lock in await asyncio.to_thread(self._take):
                    group.create_task(self._run(store, record, lock))
                if loop.time() >= clean_at_s:
                    # By the earlier of wall clock and loop clock: a clock that was set forward must not remove files.
                    await asyncio.to_thread(self._clean, min(wall_time_s(), self._began_s + loop.time()))
                    clean_at_s = loop.time() + _CLEAN_S
                await asyncio.sleep(_SCAN_S)

    def _take(self) -> list[tuple[BatchStore, BatchRecord, int]]:
        """Lock the oldest free batch of each tenant that has none running here; tenants take turns."""
        taken: list[tuple[BatchStore, BatchRecord, int]] = []
        tenants_wait = False
        try:
            stores = list(BatchStore.all(self._config))
            for store in sorted(stores, key=lambda store: (store.name <= self._last_tenant, store.name)):
                if store.name in self._running:
                    continue
                if len(self._running) >= _TENANTS_AT_ONCE:
                    tenants_wait = any(name not in self._unreadable for name in store.unended_ids())
                    if tenants_wait:
                        break
                elif (found := self._take_of(store)) is not None:
                    self._last_tenant = store.name
                    taken.append((store, *found))
        except OSError as error:
            _log.error("batches_not_read", directory=self._config.directory, error=str(error))
        self._tenants_wait = tenants_wait
        return taken

    def _take_of(self, store: BatchStore) -> tuple[BatchRecord, int] | None:
        for name in store.unended_ids():
            if name in self._unreadable or (lock := store.try_lock(name)) is None:
                continue
            try:
                record = store.record(name)
            except (OSError, ValueError, RequestError) as error:
                os.close(lock)
                self._unreadable.add(name)
                _log.error("batch_not_read", batch=name, **cause(error))
                continue
            self._running[store.name] = name
            return record, lock
        return None

    def _clean(self, now: float) -> None:
        try:
            for store in BatchStore.all(self._config):
                store.clean(now)
        except OSError as error:
            _log.error("batches_not_cleaned", directory=self._config.directory, error=str(error))

    async def _run(self, store: BatchStore, record: BatchRecord, lock: int) -> None:
        batch = record.batch
        try:
            if batch.status in ENDED:
                return  # another process ended it before the lock was taken
            loop = asyncio.get_running_loop()
            turn_ends_s = loop.time() + _TURN_S

            def gives_way() -> bool:
                return self._tenants_wait and loop.time() >= turn_ends_s

            await BatchRun(self._frontend, self._gaps, store, record, gives_way).run()
            if batch.status not in ENDED:
                return  # another tenant's turn
            counts = batch.request_counts
            _log.info(
                "batch_ended", batch=batch.id, status=batch.status, total=counts.total, failed=counts.failed
            )
        except Exception as error:  # noqa: BLE001 - one batch must not end the others
            if (problem := _disk_problem(error)) is None:
                problem = await self._fail(store, record, error)
            if problem is not None:
                _log.error(
                    "batch_waits_for_disk", batch=batch.id, error=str(problem), again_in_s=_DISK_PAUSE_S
                )
                await asyncio.sleep(_DISK_PAUSE_S)
        finally:
            os.close(lock)
            self._running.pop(store.name, None)

    async def _fail(self, store: BatchStore, record: BatchRecord, error: Exception) -> OSError | None:
        """End a batch as failed by an error of this server; give the disk error if that cannot be written."""
        batch = record.batch
        _log.error("batch_failed", batch=batch.id, exc_info=error)
        problem = BatchError(code="internal_error", message=f"{type(error).__name__}: {error}"[:300])
        batch.errors = BatchErrors(data=[problem])
        batch.status, batch.failed_at = BatchStatus.FAILED, int(wall_time_s())
        try:
            await asyncio.to_thread(store.put, record)
        except OSError as why:
            return why
        return None


def _disk_problem(error: Exception) -> OSError | None:
    """Give the disk error that ended a batch's run, after which the batch goes on from what was written; None for other errors."""
    if isinstance(error, ExceptionGroup):
        disk, others = error.split(OSError)
        found = None if others is not None or disk is None else disk.exceptions[0]
        return _disk_problem(found) if isinstance(found, Exception) else None
    is_gone = isinstance(error, FileNotFoundError)  # of the input: it does not come back
    return error if isinstance(error, OSError) and not is_gone else None
