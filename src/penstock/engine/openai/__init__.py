"""A running server as an engine, over HTTP: vLLM, SGLang, TensorRT-LLM, llama.cpp, Ollama, or any with OpenAI's completions.

Token ids go in and come out, whatever the server speaks.
"""
