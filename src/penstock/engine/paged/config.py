"""Settings of the paged engine: model, device, KV memory."""

from typing import Literal

import pydantic

from penstock.core.config import Config

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class PagedConfig(Config):
    model: str = pydantic.Field(min_length=1)
    """A directory with a checkpoint, or a name on the Hugging Face hub."""
    device: str = pydantic.Field(default="cpu", pattern=r"^(cpu|cuda)(:\d+)?$")
    """Where the model computes: cpu, cuda or cuda:N; cpu:N keeps its threads to core N, and those after it with more `threads`."""
    dtype: Dtype = "auto"
    """Number format of weights and KV; auto is the checkpoint's own."""
    block_size: int = pydantic.Field(default=16, ge=1, le=1024)
    """Tokens in a KV block."""
    kv_blocks: int | None = pydantic.Field(default=None, ge=2)
    """KV blocks to keep; None is as many as `kv_memory_bytes` holds."""
    kv_memory_bytes: int | None = pydantic.Field(default=None, ge=1)
    """Memory for KV blocks where `kv_blocks` is not given; None is 1 GiB on a CPU and 85 % of what is free on a GPU."""
    sharing_engines: int = pydantic.Field(default=1, ge=1)
    """Engines that take their memory from this machine at the same time, this one included; only the default of `kv_memory_bytes` depends on it."""
    context_length: int | None = pydantic.Field(default=None, ge=1)
    """Tokens a request may have, prompt and output; None is the model's own limit."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens beside those that the checkpoint names."""
    threads: int = pydantic.Field(default=1, ge=1)
    """CPU threads of one step. More than the cores that are free makes steps many times slower."""
    window_tables: bool = True
    """Whether layers with a sliding window keep the blocks of their window alone, in block tables of their own, where a request of
    `context_length` tokens then takes less memory. Such an engine takes no part in KV transfers."""
