"""Images, audio and video, decoded and processed by vLLM's own multimodal processor, in its thread."""

import asyncio
from collections import defaultdict
from typing import Any

from penstock.core.errors import EngineError, PenstockError, RequestError
from penstock.core.types.requests import (
    MODALITIES,
    ExpandedPrompt,
    MediaItem,
    MediaKind,
    MediaPrompt,
    Request,
)
from penstock.core.wire import pack_tokens, token_list

_ITEMS_MAX = 256
"""vLLM's own limit is 999 where the operator sets none (`limit_mm_per_prompt`)."""


class MediaReader:
    """Makes vLLM's inputs of prompts with media.

    vLLM keeps what it has processed by an item's digest. Of its two caches this uses the one without a mirror in the engine core:
    a prompt that is only expanded, or aborted before it is sent, would leave the two different.
    """

    def __init__(self, processor: Any) -> None:
        """Make it; `processor` is vLLM's InputProcessor."""
        self._renderer = processor.renderer
        self._config = processor.model_config
        self.kinds = _kinds(processor) if processor.supports_mm_inputs else ()
        """What the model takes."""

    async def expand(self, prompt: MediaPrompt) -> ExpandedPrompt:
        """Put as many tokens in place of each placeholder as vLLM computes for it.

        Raises:
            RequestError: vLLM refuses an item, or their number.
        """
        inputs = await self._process(prompt)
        place = {name: iter(ranges) for name, ranges in inputs["mm_placeholders"].items()}
        positions = tuple(next(place[item.modality]).offset for item in prompt.items)
        return ExpandedPrompt(token_ids=pack_tokens(inputs["prompt_token_ids"]), positions=positions)

    async def prompt(self, request: Request) -> Any:
        """Make vLLM's MultiModalInput of a request that has media.

        Raises:
            RequestError: vLLM refuses an item.
            EngineError: this vLLM expands the prompt to other tokens than the one that did it for the frontend.
        """
        from vllm.inputs.engine import mm_input  # noqa: PLC0415 - an optional package of gigabytes

        assert request.media is not None, "it has media"
        inputs = await self._process(request.media)
        token_ids, expanded = token_list(request.token_ids), inputs["prompt_token_ids"]
        if token_ids[: len(expanded)] != expanded:
            raise EngineError(
                f"request {request.request_id}: its media take {len(expanded)} prompt tokens here, others than at the worker"
                " that expanded them; start all workers of a model with the same engine_args"
            )
        return mm_input(
            token_ids,
            inputs["mm_kwargs"],
            inputs["mm_hashes"],
            inputs["mm_placeholders"],
            cache_salt=request.salt.hex() or None,
        )

    async def _process(self, prompt: MediaPrompt) -> Any:
        """Decode and process the media of a prompt.

        Raises:
            RequestError: an item cannot be read, or vLLM refuses it. Decoders and processors raise anything.
            EngineError: this host lacks something for it, as memory.
        """
        data: dict[str, list[Any]] = defaultdict(list)
        names: dict[str, list[str]] = defaultdict(list)
        for number, item in enumerate(prompt.items):
            self._check(item, number)
            try:
                data[item.modality].append(await asyncio.to_thread(self._decode, item))
            except BaseException as error:
                raise _refusal(f"{item.modality} {number} of the request cannot be read", error) from error
            names[item.modality].append(item.digest.hex())
        try:
            return await self._renderer._process_multimodal_async(
                token_list(prompt.token_ids), dict(data), dict(names), None, skip_mm_cache=True
            )
        except BaseException as error:
            raise _refusal("vLLM refuses the media of the request", error) from error

    def _check(self, item: MediaItem, number: int) -> None:
        if all(kind.modality != item.modality for kind in self.kinds):
            raise RequestError(
                f"{item.modality} {number} of the request: the model takes no {item.modality}",
                param="messages",
            )

    def _decode(self, item: MediaItem) -> Any:
        """Decode a file as vLLM's server does, with the operator's `media_io_kwargs`."""
        from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO  # noqa: PLC0415 - as above

        options = {
            name: dict(value)
            for name, value in (self._config.multimodal_config.media_io_kwargs or {}).items()
        }
        if item.modality == "audio":
            return AudioMediaIO(**options.get("audio", {})).load_bytes(item.data)
        images = ImageMediaIO(**({"image_mode": "RGB"} | options.get("image", {})))
        if item.modality == "image":
            return images.load_bytes(item.data)
        return VideoMediaIO(images, **options.get("video", {})).load_bytes(item.data)


def _kinds(processor: Any) -> tuple[MediaKind, ...]:
    """Ask the model's class what it takes, with the operator's `limit_mm_per_prompt`."""
    from vllm.model_executor.model_loader.utils import get_model_cls  # noqa: PLC0415 - an optional package of gigabytes

    limits = processor.renderer.get_mm_processor().info.allowed_mm_limits
    model = get_model_cls(processor.model_config)
    kinds = []
    for modality in MODALITIES:
        most = limits.get(modality, 0)
        if most:
            placeholder = model.get_placeholder_str(modality, 1) or ""
            kinds.append(
                MediaKind(modality=modality, placeholder=placeholder, items_max=min(most, _ITEMS_MAX))
            )
    return tuple(kinds)


def _refusal(what: str, error: BaseException) -> PenstockError:
    """Make an error of the request of one about media; a panic of Rust code, or SystemExit, would end more than this request.

    Raises:
        BaseException: `error`, where it is about this task.
    """
    task = asyncio.current_task()
    is_cancelled = isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
    if is_cancelled or isinstance(error, GeneratorExit | KeyboardInterrupt):
        raise error
    said = " ".join(str(error).split())[:300]
    text = f"{what}: {said if ' ' in said else repr(error)}"
    is_of_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
    if is_of_host or not isinstance(error, Exception):
        return EngineError(text)
    return RequestError(text, param="messages")
