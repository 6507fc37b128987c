"""KV events of other engines, as vLLM, SGLang and TensorRT-LLM publish them, translated into Penstock's."""
