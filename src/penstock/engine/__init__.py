"""Floor 4: engines. `mock` and `paged` share one scheduler; `vllm`, `sglang` and `trtllm` drive those packages, `openai` a running server."""
