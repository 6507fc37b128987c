"""The text the demo model learns from: templates and facts of this project, expanded with a seed.

A fact (`facts/*.yaml`) is an answer with a key phrase and many ways to ask for it. A question is a template expanded at
random and then roughened as people write: politeness, synonyms, contractions, casing, missing marks, typing errors.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
HELDOUT = HERE.parents[1] / "tests" / "data" / "demo_questions.json"

Message = dict[str, str]

_FACT_FILES = ("about", "commands", "concepts", "smalltalk")
_FRAMED = {"nouns": "N", "actions": "A", "finds": "F"}  # a list of frames, and the slot in them
_UNKNOWN = "unknown"
_CONTRACTIONS = {
    "what is": "what's", "where is": "where's", "do not": "don't", "does not": "doesn't", "i am": "i'm",
    "i would": "i'd", "i have": "i've", "is not": "isn't", "cannot": "can't", "it is": "it's", "how is": "how's",
}  # fmt: skip
_PROPER = {
    "penstock": "Penstock", "gpu": "GPU", "gpus": "GPUs", "cpu": "CPU", "kv": "KV", "python": "Python", "http": "HTTP",
    "openai": "OpenAI", "prometheus": "Prometheus", "grafana": "Grafana", "nvidia": "NVIDIA", "dynamo": "Dynamo",
    "ttft": "TTFT", "itl": "ITL", "slo": "SLO", "llm": "LLM", "llms": "LLMs", "ai": "AI", "api": "API", "url": "URL",
    "json": "JSON", "yaml": "YAML", "vllm": "vLLM", "sglang": "SGLang", "linux": "Linux", "kubernetes": "Kubernetes",
    "docker": "Docker", "llama": "Llama", "qwen": "Qwen", "mistral": "Mistral", "gemma": "Gemma", "pytorch": "PyTorch",
    "rust": "Rust", "chatgpt": "ChatGPT", "siphash": "SipHash", "tcp": "TCP", "cli": "CLI", "english": "English",
    "german": "German", "french": "French", "spanish": "Spanish", "debian": "Debian", "ctrl-c": "Ctrl-C",
    "i": "I", "i'm": "I'm", "i'd": "I'd", "i've": "I've",
}  # fmt: skip
_ASKS = re.compile(
    r"(what|who|whom|whose|where|when|why|which|how|is|are|am|was|were|do|does|did|can|could|may|must|will|would|should"
    r"|shall|has|have|at|on|in|under|for|with|by)\b",
    re.IGNORECASE,
)
_KEYBOARD = "qwertyuiopasdfghjklzxcvbnm"


@dataclass(frozen=True, slots=True)
class Source:
    """Questions of one form: `fillers` go into the `slot` of one of the `frames`, or are asked as they are."""

    fillers: tuple[str, ...]
    frames: tuple[str, ...] = ()
    slot: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing the model knows: `answers` all contain `key`, each of `sources` is as likely as the others."""

    intent: str
    key: str
    answers: tuple[str, ...]
    sources: tuple[Source, ...]
    weight: float = 1.0
    bare: bool = False  # small talk: hardly any "quick question:" before it


def normalise(text: str) -> str:
    """Reduce a question to its lower-case words, so that casing and marks do not hide that two are the same."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def heldout_questions(path: Path = HELDOUT) -> list[str]:
    return [item["question"] for item in json.loads(path.read_text())]


def _lines(block: str) -> tuple[str, ...]:
    return tuple(line for line in block.splitlines() if line.strip())


def _load(name: str) -> dict[str, object] | list[dict[str, object]]:
    return yaml.safe_load((HERE / "facts" / f"{name}.yaml").read_text())


# -- templates ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    branches: tuple[tuple[object, ...], ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class _Macro:
    name: str


@cache
def _parse(template: str) -> tuple[object, ...]:
    """Read `(a|b)`, `[x]` and `{name}` into a tree."""
    position = 0

    def branches(closing: str) -> tuple[tuple[object, ...], ...]:
        nonlocal position
        found: list[tuple[object, ...]] = []
        nodes: list[object] = []
        while position < len(template):
            char = template[position]
            position += 1
            if char == closing or (closing and char == "|"):
                found.append(tuple(nodes))
                nodes = []
                if char == closing:
                    return tuple(found)
            elif char in "([":
                nodes.append(_Choice(branches(")" if char == "(" else "]"), optional=char == "["))
            elif char == "{":
                end = template.index("}", position)
                nodes.append(_Macro(template[position:end]))
                position = end + 1
            else:
                nodes.append(char)
        if closing:
            raise ValueError(f"template {template!r}: {closing!r} is missing")
        return (tuple(nodes),)

    return branches("")[0]


@dataclass(slots=True)
class Expander:
    """Turns templates into text; `pools` gives the words of each macro, themselves templates."""

    rng: random.Random
    pools: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def expand(self, template: str, **slots: str) -> str:
        text = re.sub(r"\s+", " ", self._render(_parse(template), slots)).strip()
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

    def _render(self, nodes: tuple[object, ...], slots: dict[str, str]) -> str:
        return "".join(self._node(node, slots) for node in nodes)

    def _node(self, node: object, slots: dict[str, str]) -> str:
        match node:
            case _Choice(branches, optional):
                if optional and self.rng.random() < 0.5:
                    return ""
                return self._render(self.rng.choice(branches), slots)
            case _Macro("number"):
                return str(self.rng.choice((self.rng.randrange(2, 13), self.rng.randrange(2, 1000))))
            case _Macro(name):
                text = slots[name] if name in slots else self.rng.choice(self.pools[name])
                return self._render(_parse(text), slots)
        return str(node)


# -- the corpus --------------------------------------------------------------------------------------------------------


class Corpus:
    """An endless, seeded stream of conversations and documents; no held-out question is ever in it.

    `substitutions` fills the figures of the model itself into its answers, such as its number of parameters.
    """

    def __init__(self, seed: int, substitutions: dict[str, str]) -> None:
        self._rng = random.Random(seed)
        frames = _load("frames")
        unknown = _load("unknown")
        self._prefixes = _lines(frames["prefixes"])
        self._suffixes = _lines(frames["suffixes"])
        self._systems = _lines(frames["systems"])
        self._noise = frames["noise"].split()
        self._synonyms = {word: others.split("|") for word, others in frames["synonyms"].items()}
        self._follow_ups = frames["follow_ups"]
        pools = {name: (template,) for name, template in frames["macros"].items()}
        for name in ("place", "work", "thing", "deed"):
            pools[name] = tuple(word.strip() for word in unknown[name].split(","))
        self._expander = Expander(self._rng, pools)
        self._banned = [normalise(question) for question in heldout_questions()]
        self.facts = self._read_facts(frames, unknown, substitutions)
        self._weights = [fact.weight for fact in self.facts.values()]

    @staticmethod
    def _read_facts(frames: dict, unknown: dict, substitutions: dict[str, str]) -> dict[str, Fact]:
        facts: dict[str, Fact] = {}
        for file in _FACT_FILES:
            for entry in _load(file):
                sources = [Source(_lines(entry["ask"]))] * 2
                sources += [
                    Source(_lines(entry[kind]), tuple(frames[kind]), slot)
                    for kind, slot in _FRAMED.items()
                    if kind in entry
                ]
                answers = []
                for answer in entry["answers"]:
                    for name, value in substitutions.items():
                        answer = answer.replace("{" + name + "}", value)  # noqa: PLW2901
                    if entry["key"] not in answer:
                        raise ValueError(f"{file}.yaml: {entry['intent']}: no {entry['key']!r} in {answer!r}")
                    answers.append(answer)
                facts[entry["intent"]] = Fact(
                    entry["intent"],
                    entry["key"],
                    tuple(answers),
                    tuple(sources),
                    entry.get("weight", 1.0),
                    entry.get("bare", False),
                )
        # One question in eight is about something else: half from its own templates, half in the frames of the facts.
        total = sum(fact.weight for fact in facts.values())
        asks = Source(_lines(unknown["ask"]))
        things = Source(("{thing}", "a {thing}", "the {thing}"), tuple(frames["nouns"]), "N")
        deeds = Source(("{deed}",), tuple(frames["actions"]), "A")
        sources = (asks, asks, things, deeds)
        facts[_UNKNOWN] = Fact(_UNKNOWN, unknown["key"], tuple(unknown["answers"]), sources, total / 7)
        return facts

    # -- one question --------------------------------------------------------------------------------------------------

    def question(self, fact: Fact) -> str:
        """Ask for a fact in a random way."""
        while True:
            source = self._rng.choice(fact.sources)
            text = self._expander.expand(self._rng.choice(source.fillers))
            if source.frames:
                text = self._expander.expand(self._rng.choice(source.frames), **{source.slot: text})
            text = self._roughen(text, bare=fact.bare)
            if not any(banned in normalise(text) for banned in self._banned):
                return text

    def _roughen(self, text: str, *, bare: bool) -> str:
        rng = self._rng
        if rng.random() < 0.35:
            found = [word for word in self._synonyms if re.search(rf"\b{word}\b", text)]
            if found:
                word = rng.choice(found)
                text = re.sub(rf"\b{word}\b", rng.choice(self._synonyms[word]), text, count=1)
        if rng.random() < 0.45:
            for long, short in _CONTRACTIONS.items():
                text = re.sub(rf"\b{long}\b", short, text)
        mark = self._mark(text)
        if rng.random() < (0.15 if bare else 0.35):
            text = self._blurred(text)
        if rng.random() < (0.05 if bare else 0.1):
            suffix = rng.choice(self._suffixes)
            text += suffix if suffix[0] in ",.?" else " " + suffix
        if rng.random() < (0.08 if bare else 0.3):
            prefix = rng.choice(self._prefixes)
            if prefix[-1] in ".!" and rng.random() < 0.7:
                text = text[0].upper() + text[1:]
            text = f"{prefix} {text}"
        return self._typed(self._cased(text) + mark)

    def _blurred(self, text: str) -> str:
        """Drop and put in words without a subject, so that the others decide what a question is about."""
        if sum(word not in self._noise for word in text.split(" ")) < 2:
            return text
        words = []
        for word in text.split(" "):
            if word not in self._noise or self._rng.random() > 0.15:
                words.append(word)
            if self._rng.random() < 0.08:
                words.append(self._rng.choice(self._noise))
        return " ".join(words)

    def _mark(self, text: str) -> str:
        if _ASKS.match(text):
            return self._rng.choices(("?", "", "??", "."), (78, 18, 2, 2))[0]
        return self._rng.choices((".", "", "!", "?"), (40, 38, 8, 14))[0]

    def _cased(self, text: str) -> str:
        style = self._rng.random()
        if style < 0.05:
            return text.lower() if style < 0.04 else text.upper()
        if style < 0.75:
            # Words of a command, a path or a flag keep their letters.
            words = text.split(" ")
            for index, word in enumerate(words):
                after = words[index + 1] if index + 1 < len(words) else ""
                if not (word == "penstock" and re.match(r"serve|bench|-|command", after)):
                    bare = word.strip(",.?!:")
                    words[index] = word.replace(bare, _PROPER.get(bare, bare)) if bare else word
            text = " ".join(words)
            return text if text.startswith("penstock ") else text[:1].upper() + text[1:]
        return text

    def _typed(self, text: str) -> str:
        """Make a typing error now and then."""
        rng = self._rng
        if len(text) < 8 or rng.random() > 0.08:
            return text
        at = rng.randrange(1, len(text) - 2)
        replacement = rng.choice((text[at + 1] + text[at], text[at + 1], text[at] * 2 + text[at + 1]))
        if rng.random() < 0.25:
            replacement = rng.choice(_KEYBOARD) + text[at + 1]
        return text[:at] + replacement + text[at + 2 :]

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _turn(self, fact: Fact) -> list[Message]:
        return [
            {"role": "user", "content": self.question(fact)},
            {"role": "assistant", "content": self._rng.choice(fact.answers)},
        ]

    def _pick(self) -> Fact:
        return self._rng.choices(list(self.facts.values()), self._weights)[0]

    def conversation(self, turns: int | None = None) -> list[Message]:
        """Make a chat: mostly one question, sometimes several, sometimes one that needs the answer before it."""
        rng = self._rng
        messages: list[Message] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(self._systems)})
        if turns is None:
            turns = rng.choices((1, 2, 3, 4, 6), (82, 10, 5, 2, 1))[0]
        while turns > 0:
            if turns > 1 and rng.random() < 0.35:
                first, second, template = rng.choice(self._follow_ups)
                messages += self._turn(self.facts[first])
                question = self._roughen(self._expander.expand(template), bare=True)
                answer = rng.choice(self.facts[second].answers)
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                turns -= 2
            else:
                messages += self._turn(self._pick())
                turns -= 1
        return messages

    def document(self) -> str:
        """Make plain text of a few answers, for completion without a chat."""
        known = [fact for fact in self.facts.values() if not fact.bare and fact.intent != _UNKNOWN]
        return " ".join(
            self._rng.choice(fact.answers) for fact in self._rng.sample(known, self._rng.randrange(1, 5))
        )

    def conversations(self, count: int) -> Iterator[list[Message]]:
        return (self.conversation() for _ in range(count))


if __name__ == "__main__":
    for chat in Corpus(0, {"PARAMS": "2.5", "MEGABYTES": "5"}).conversations(40):
        print(" / ".join(f"{message['role']}: {message['content']}" for message in chat))
