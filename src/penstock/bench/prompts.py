"""Prompts of a given token length for an unknown tokenizer, by a linear fit to the server's counts of two probes.

Text is random common English words; equal seeds give equal prompts.
"""

import functools
import random
from dataclasses import dataclass

from penstock.sim.workload.trace import PREFIX_BLOCK_TOKENS

_COMMON = (
    "about above after again air all along also always and animal answer any around ask away back because been "
    "before began below between big book both boy build but call came can carry change children city close come "
    "could country cut day did different does done down each early earth eat end enough even every example eye "
    "face family far father feet few find first follow food for form found four from full gave get girl give go "
    "good great group grow had half hand hard has have head hear help her here high him his home house how idea "
    "into just keep kind knew know land large last later learn leave left letter life light like line list little "
    "live long look made make man many may mean men might mile miss more most mother mountain move much must name "
    "near need never new next night north now number off often old once one only open order other our out over "
    "page paper part people picture place plain plan plant play point port press quick read real right river road "
    "rock room run said same saw say school sea second see seem sentence set she ship should show side sleep small "
    "some song soon sound south spell stand star start state stay still stop story study sun take talk tell than "
    "that their them then there these they thing think those thought three time together took tree true try turn "
    "two under until use very voice walk want war water way week well went were what wheel when where which while "
    "white who why will wind with wood word work world would write year you young your"
)
_WORDS = _COMMON.split()
PROBES = (_WORDS[0], " ".join(_WORDS))
"""Two prompts whose tokens the server counts: one word, and every word once."""
_BLOCK_TEXTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Scale:
    """Tokens of a prompt: `overhead_tokens` for the chat template plus `tokens_per_word` per word."""

    overhead_tokens: float
    tokens_per_word: float

    @classmethod
    def fit(cls, counted: tuple[int, int]) -> "Scale":
        """Fit to the server's counts for `PROBES`."""
        short_tokens, long_tokens = counted
        slope = max((long_tokens - short_tokens) / (len(_WORDS) - 1), 0.1)
        return cls(max(short_tokens - slope, 0.0), slope)

    def words(self, num_tokens: float) -> int:
        """Give the number of words with `num_tokens` tokens, without the template."""
        return max(round(num_tokens / self.tokens_per_word), 1)


class Prompts:
    def __init__(self, seed: int, scale: Scale) -> None:
        self._seed = seed
        self._scale = scale
        self._block = functools.lru_cache(maxsize=_BLOCK_TEXTS_MAX)(self._block_text)

    def unique(self, index: int, num_tokens: int) -> str:
        """Make the prompt of request `index`, which shares no prefix with others."""
        words = self._scale.words(num_tokens - self._scale.overhead_tokens)
        return text(f"{self._seed}/request/{index}", words)

    def shared(self, prefix_ids: tuple[int, ...], num_tokens: int) -> str:
        """Make a prompt of 512-token blocks that depend only on their ids, cut to `num_tokens`."""
        wanted = self._scale.words(num_tokens - self._scale.overhead_tokens)
        words: list[str] = []
        for prefix_id in prefix_ids:
            if len(words) >= wanted:
                break
            words += self._block(prefix_id)
        return " ".join(words[:wanted])

    def _block_text(self, prefix_id: int) -> tuple[str, ...]:
        words = self._scale.words(PREFIX_BLOCK_TOKENS)
        return tuple(text(f"{self._seed}/block/{prefix_id}", words).split())


def text(seed: str, num_words: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=num_words))
