"""One batch, from wherever it was left to its end."""

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.core.clock import wall_time_s
from penstock.frontend.batches.gaps import Gaps
from penstock.frontend.batches.lines import check_input, digest, read_done, read_lines
from penstock.frontend.batches.objects import (
    BatchError,
    BatchErrors,
    BatchLine,
    BatchRecord,
    BatchStatus,
)
from penstock.frontend.batches.one import answer_line, expired_line
from penstock.frontend.batches.store import BatchStore
from penstock.frontend.frontend import Frontend
from penstock.frontend.limits.headers import RequestOptions
from penstock.frontend.tenants.tenants import PRIORITY_MAX

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
        gaps: Gaps,
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
