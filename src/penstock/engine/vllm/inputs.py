"""Requests as vLLM's engine core takes them."""

from typing import Any

import msgspec

from penstock.core.errors import EngineError, RequestError
from penstock.core.types.requests import Request
from penstock.core.wire import token_list


class Inputs:
    """Makes vLLM's EngineCoreRequest, which vLLM's own InputProcessor checks and completes."""

    def __init__(self, processor: Any, adapters: dict[str, Any]) -> None:
        """Make it.

        Args:
            processor: vLLM's InputProcessor.
            adapters: vLLM's LoRARequest of each adapter.
        """
        self._processor = processor
        self._adapters = adapters

    def make(
        self, vllm_id: str, request: Request, arguments: dict[str, Any], rank: int, prompt: Any = None
    ) -> Any:
        """Make an EngineCoreRequest.

        Args:
            vllm_id: its id in vLLM.
            request: as submitted.
            arguments: of vLLM's SamplingParams.
            rank: the data-parallel rank that computes it.
            prompt: vLLM's input with the request's media; None: the request has none.

        Raises:
            RequestError: vLLM refuses it.
            EngineError: vLLM cannot continue it.
        """
        from vllm import SamplingParams  # noqa: PLC0415 - an optional package of gigabytes
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415
        from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

        structured = request.sampling.structured
        if structured is not None and request.num_emitted:
            raise EngineError(
                f"request {request.request_id}: its worker was lost after {request.num_emitted} tokens, and vLLM cannot"
                " continue an answer that response_format constrains; send it again"
            )
        if prompt is None:
            prompt = tokens_input(token_list(request.token_ids), cache_salt=request.salt.hex() or None)
        try:
            if structured is not None:
                constraint = msgspec.json.decode(structured, type=dict[str, Any])
                arguments = arguments | {"structured_outputs": StructuredOutputsParams(**constraint)}
            return self._processor.process_inputs(
                vllm_id,
                prompt,
                SamplingParams(**arguments),
                ("generate",),
                lora_request=self._adapters[request.adapter] if request.adapter else None,
                priority=-request.priority,
                data_parallel_rank=rank,
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            param = getattr(error, "parameter", None)
            if param is None and structured is not None:
                param = "response_format"
            raise RequestError(f"vLLM: {' '.join(str(error.args[0]).split())}", param=param) from error
