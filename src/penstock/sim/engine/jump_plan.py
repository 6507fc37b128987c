"""The next jump of the jump engine."""

from dataclasses import dataclass


@dataclass(slots=True)
class JumpPlan:
    """Either `steps` decode steps, or one step with prefill chunks and decode.

    batch:   decoding sequences, including prompts that lack only their last token, which cost the same
    context: sum of their tokens at the first step
    chunks:  (tokens to compute, tokens before them) of the other prompts; None for decode steps
    """

    steps: int
    batch: int
    context: int
    chunks: list[tuple[int, int]] | None
