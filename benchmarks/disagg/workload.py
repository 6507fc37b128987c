"""What is asked of every side alike: streams that go on all the time, and long prompts that come at random moments."""

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
class Workload:
    """Each stream's user asks again as soon as an answer ends; nobody waits for answers to long prompts.

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
    """For which prompts come, and gaps and tokens count."""
    seed: int
    arrivals: str = ARRIVALS[0]
    """One of `ARRIVALS`."""

    @property
    def prompt_tokens_mean(self) -> float:
        return (self.prompt_tokens_min + self.prompt_tokens_max) / 2

    def long_prompts(self, rate_per_s: float) -> list[Arrival]:
        """Draw when long prompts come and how long they are: the same for the same rate and seed.

        They come one every so often, or independently of each other, as Poisson arrivals of which it is known how many there
        are: their number, on which all figures depend, is the same for every seed.
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
