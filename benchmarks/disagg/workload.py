"""The workload of every side: streams that decode all the time, and long prompts at random times."""

import random
from dataclasses import dataclass

ARRIVALS = ("poisson", "even")
_PROMPTS_MIN = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A long prompt, due `at_s` seconds after the beginning."""

    index: int
    at_s: float
    input_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsAndPrompts:
    """Streams that send their next request when an answer ends, and long prompts that do not wait for answers.

    Streams' prompts are too short to be disaggregated, and hardly lengthen a step. Streams' answers are so short that a step's
    time is that of the model's layers, not of attention.
    """

    streams: int
    stream_input_tokens: int = 16
    stream_output_tokens: int = 400
    prompt_tokens_min: int
    prompt_tokens_max: int
    prompt_output_tokens: int = 16
    seconds: float
    """The measured time, in which prompts arrive."""
    seed: int
    arrivals: str = ARRIVALS[0]
    """One of `ARRIVALS`."""

    @property
    def prompt_tokens_mean(self) -> float:
        return (self.prompt_tokens_min + self.prompt_tokens_max) / 2

    def long_prompts(self, rate_per_s: float) -> list[Arrival]:
        """Draw times and lengths of the long prompts: the same for the same rate and seed.

        Arrivals are even, or Poisson arrivals given their number: every seed has the same number of prompts.
        """
        random_ = random.Random(self.seed)
        count = max(round(rate_per_s * self.seconds), _PROMPTS_MIN)
        if self.arrivals == "even":
            moments = [(index + 0.5) / count * self.seconds for index in range(count)]
        else:
            moments = sorted(random_.uniform(0, self.seconds) for _ in range(count))
        return [
            Arrival(index, at_s, random_.randint(self.prompt_tokens_min, self.prompt_tokens_max))
            for index, at_s in enumerate(moments)
        ]
