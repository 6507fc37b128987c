"""The demo model in the package, for a first answer without a download.

It is a Llama-style checkpoint of 5 MB that answers short questions about Penstock only. The repository's
tools/demo_model trains it from a seed.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""The checkpoint in `transformers` format: config, tokenizer with chat template, safetensors weights."""

MODEL_NAME = "penstock-demo"
"""Served model name."""
