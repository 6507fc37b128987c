"""The demo model that comes with the package, so that a first answer needs no download.

It is a Llama-style checkpoint of 5 MB which answers short questions about Penstock and knows nothing else. The
repository's tools/demo_model makes it from a seed.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parent / "model"
"""The checkpoint as `transformers` writes it: config, tokenizer with chat template, safetensors weights."""

MODEL_NAME = "penstock-demo"
"""The name under which it is served."""
