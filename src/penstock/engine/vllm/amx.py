"""Imported by vLLM's worker processes on CPUs, as its `worker_extension_cls`: asks the kernel for AMX tiles.

Linux ends a process that uses tiles without having asked (SIGILL). vLLM 0.32 computes bfloat16 attention with tiles and leaves the
asking to oneDNN, which asks in the first large product of matrices: a worker whose first step has few tokens dies of it, such as a
decode worker's, whose prompts come computed.
"""

import torch


class AmxTiles:
    """Adds nothing to vLLM's worker; importing its module is what counts."""


if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()
