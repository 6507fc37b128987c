"""Engines that answer each request by a stream of its own, such as SGLang and TensorRT-LLM, behind the seam of engine steps.

An adapter writes a `Backend`; `StreamedEngine` makes steps, load, admission and aborts of it.
"""
