"""Reasoning between tags, before the answer."""

from dataclasses import dataclass

from penstock.frontend.parsing.source import Output, Source, Steps


@dataclass(frozen=True, slots=True)
class Tags:
    """What begins and ends reasoning."""

    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Tell whether a prompt ends within reasoning, as where the template begins it."""
        return prompt.rstrip().endswith(self.begin)

    def read(self, source: Source, out: Output, *, begun: bool) -> Steps:
        """Read reasoning, if the text begins with some; `begun`: the prompt has begun it."""
        space = yield from source.skip_space()
        if not (yield from source.begins_with(self.begin)) and not begun:
            out.content(space)
            return
        yield from source.skip_space()
        yield from source.until((self.end,), out.reasoning)
        yield from source.skip_space()


THINK = Tags("<think>", "</think>")
MISTRAL_THINK = Tags("[THINK]", "[/THINK]")
