"""What a simulated engine that jumps does next."""

from dataclasses import dataclass

from penstock.sim.batch import SimSequence


@dataclass(slots=True)
class JumpPlan:
    """What comes next: `steps` decode steps, or one step that computes parts of prompts beside decoding.

    batch:   how many decode
    context: their tokens at the first step
    prompts: (sequence, tokens to compute)
    singles: those of the prompts that compute only their last token, which costs what decoding does
    """

    steps: int
    batch: int
    context: int
    prompts: list[tuple[SimSequence, int]]
    singles: list[SimSequence]
