"""Runs the batches of all tenants: takes batches that no other process runs, and continues unfinished ones."""

import asyncio
import os

from penstock.core.clock import wall_time_s
from penstock.core.errors import RequestError
from penstock.core.log import cause, get_logger
from penstock.frontend.batches.gaps import Gaps
from penstock.frontend.batches.objects import ENDED, BatchError, BatchErrors, BatchRecord, BatchStatus
from penstock.frontend.batches.run import BatchRun
from penstock.frontend.batches.store import BatchStore
from penstock.frontend.frontend import Frontend

_SCAN_S = 1.0
_CLEAN_S = 600.0
_TENANTS_AT_ONCE = 16
"""Tenants whose batches run at once here. A tenant's batches run one after another; one batch alone may use all of `at_once`."""
_TURN_S = 60.0
"""How long a batch runs before it gives way, where tenants beyond those at once wait."""
_DISK_PAUSE_S = 10.0
_log = get_logger()


class BatchRunner:
    """Runs batches until it is cancelled. One event loop owns it."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._config = frontend.config.batches
        self._gaps = Gaps(
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
