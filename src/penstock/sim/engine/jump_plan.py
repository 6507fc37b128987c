"""What a simulated engine that jumps does next."""

from dataclasses import dataclass


@dataclass(slots=True)
class JumpPlan:
    """What comes next: `steps` decode steps, or one step that computes parts of prompts beside decoding.

    batch:   how many decode, those prompts included that lack only their last token, as they cost the same
    context: their tokens at the first step
    chunks:  of the other prompts: (tokens to compute, tokens before them); None where all decode
    """

    steps: int
    batch: int
    context: int
    chunks: list[tuple[int, int]] | None
