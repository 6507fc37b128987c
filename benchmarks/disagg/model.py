"""The model of this bench: random weights, and so narrow that prefill and decode on one CPU core have a ratio close to a GPU's.

A prompt of 2,350 tokens takes about half a second and a decode step of six sequences 8 milliseconds: some 60 steps a prompt.
Wider models have several hundred steps a prompt on a CPU; 8 billion parameters on an H100 have ten to twenty.
Two query heads share keys and values, as four to eight do in today's models.
"""

from pathlib import Path

SIZES = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 20,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 8192,
}  # fmt: skip
KV_BYTES_PER_TOKEN = (
    2 * 4 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * SIZES["head_dim"]
)  # keys and values, float32


def make_model(directory: Path, seed: int) -> Path:
    """Write the checkpoint."""
    from tests.support.checkpoints import make_checkpoint  # noqa: PLC0415 - its packages are an extra

    return make_checkpoint(directory / "model", "llama", seed=seed, **SIZES)
