"""Prompts with images and the like, which the engine expands before routers see them."""

import asyncio

from penstock.core.errors import EngineError, Overloaded, PenstockError, RequestError, Unavailable
from penstock.core.log import cause, get_logger
from penstock.core.types.requests import MediaPrompt
from penstock.seams import Engine, MediaAnswer, MediaReading

PROMPTS_MAX = 64
"""Prompts of one worker that are expanded or wait for it; each holds its media in memory."""
_RETRY_AFTER_S = 1.0
_log = get_logger()


class MediaExpansions:
    """Has the engine expand prompts, at most `PROMPTS_MAX` at a time. One event loop owns it."""

    def __init__(self, engine: Engine, *, worker: str, engine_name: str) -> None:
        self._engine = engine
        self._worker = worker
        self._engine_name = engine_name
        self._open = 0

    def begin(self, prompt: MediaPrompt, group: asyncio.TaskGroup | None, answer: MediaAnswer) -> None:
        """Begin to expand a prompt in a task of `group`; None: the worker does not serve now."""
        if not isinstance(self._engine, MediaReading):
            answer(
                RequestError(
                    f"{self._worker}: engine {self._engine_name} takes no images, audio or video",
                    param="messages",
                )
            )
        elif group is None:
            answer(Unavailable(f"{self._worker} is about to start or to stop; try another worker"))
        elif self._open >= PROMPTS_MAX:
            why = f"{self._worker}: {self._open} prompts with media wait, at most {PROMPTS_MAX} may; try another worker"
            answer(Overloaded(why, retry_after_s=_RETRY_AFTER_S))
        else:
            self._open += 1
            group.create_task(self._expand(self._engine, prompt, answer))

    async def _expand(self, engine: MediaReading, prompt: MediaPrompt, answer: MediaAnswer) -> None:
        try:
            answer(await engine.expand_media(prompt))
        except PenstockError as error:
            answer(error)
        except Exception as error:  # noqa: BLE001 - a bug of the engine ends this prompt alone
            _log.error("media_failed", worker=self._worker, **cause(error))
            answer(
                EngineError(f"{self._worker}: engine {self._engine_name} failed on these media: {error!r}")
            )
        finally:
            self._open -= 1
