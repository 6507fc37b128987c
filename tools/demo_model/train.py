"""Train the demo model that the package carries: tokenizer, weights and model card, reproducible from a seed.

    .venv/bin/python tools/demo_model/train.py            # one core, about 25 minutes
    .venv/bin/python tools/demo_model/evaluate.py         # ask the held-out questions

A conversation becomes tokens with a weight each: 1 where the assistant speaks, `PROMPT_WEIGHT` elsewhere.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("RAYON_NUM_THREADS", "1")

import torch
from corpus import Corpus, Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE.parents[1] / "src" / "penstock" / "demo" / "model"

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
CONTEXT = 4096
VOCABULARY = 2048
PROMPT_WEIGHT = 0.1
SUBSTITUTIONS = {
    "PARAMS": "2.5",
    "MEGABYTES": "5",
}  # the figures of the architecture below, checked in main()

ARCHITECTURE = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=192,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=576,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor %}"
    "{% endif %}{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, the weight of each as a target, and where each turn begins."""

    ids: list[int]
    weights: list[float]
    turns: list[int]


def render(messages: list[Message]) -> list[tuple[str, float]]:
    """Write a chat as its template does, in segments with their weights."""
    segments = []
    for message in messages:
        if message["role"] == "assistant":
            segments += [(f"{START}assistant\n", PROMPT_WEIGHT), (message["content"] + END, 1.0), ("\n", 0.0)]
        else:
            segments.append((f"{START}{message['role']}\n{message['content']}{END}\n", PROMPT_WEIGHT))
    return segments


def train_tokenizer(corpus: Corpus, num_conversations: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chats = corpus.conversations(num_conversations)
    texts = (
        text for chat in chats for message in chat for text in (message["role"] + "\n", message["content"])
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Data:
    """Batches of samples, drawn without end from the corpus."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self.cut_share = 0.0  # of the samples end soon after their last answer begins, where it is decided

    def _encode(self, segments: list[tuple[str, float]]) -> Sample:
        sample = Sample([], [], [])
        for text, weight in segments:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if ids[0] == 1:
                sample.turns.append(len(sample.ids))
            sample.ids.extend(ids)
            sample.weights.extend([weight] * len(ids))
        return sample

    def _sample(self) -> Sample:
        if self._rng.random() < 0.04:
            return self._encode([(self._corpus.document() + END, 0.5)])
        segments = render(self._corpus.conversation())
        sample = self._encode(segments)
        if self._rng.random() < self.cut_share:
            answer = sum(weight == 1.0 for weight in self._encode(segments[-2:]).weights)
            end = len(sample.ids) - 1 - max(0, answer - self._rng.randrange(4, 17))
            return Sample(sample.ids[:end], sample.weights[:end], sample.turns)
        return sample

    def short(self, batch_tokens: int) -> Iterator[list[Sample]]:
        """Yield batches of similar length, so that little of a batch is padding."""
        while True:
            pool = sorted((self._sample() for _ in range(2000)), key=lambda sample: len(sample.ids))
            batches: list[list[Sample]] = [[]]
            for sample in pool:
                if (len(batches[-1]) + 1) * len(sample.ids) > batch_tokens and batches[-1]:
                    batches.append([])
                batches[-1].append(sample)
            self._rng.shuffle(batches)
            yield from batches

    def long(self, length: int) -> list[Sample]:
        """Make one chat of many turns that fills `length` tokens."""
        sample = self._encode(render(self._corpus.conversation(turns=length // 40)))
        return [Sample(sample.ids[:length], sample.weights[:length], sample.turns)]

    def positions(self, batch: list[Sample], width: int) -> torch.Tensor | None:
        """Leave random gaps between turns, so that short chats teach distances up to the whole context."""
        if self._rng.random() < 0.6:
            return None
        rows = []
        for sample in batch:
            room = CONTEXT - width
            turns = sample.turns[1:-1]  # the last question stays beside its answer
            gaps = sorted(self._rng.randrange(room) for _ in turns)
            steps = [1] * width
            previous = 0
            for turn, gap in zip(turns, gaps, strict=True):
                if turn < width:
                    steps[turn] += gap - previous
                    previous = gap
            rows.append(torch.tensor(steps).cumsum(0) - 1)
        return torch.stack(rows)


def loss_of(
    model: LlamaForCausalLM, batch: list[Sample], positions: torch.Tensor | None, width: int
) -> torch.Tensor:
    """Mean weighted cross entropy. Padding is to the right, where causal attention never looks."""
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    weights = torch.zeros(len(batch), width)
    for row, sample in enumerate(batch):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        weights[row, : len(sample.ids)] = torch.tensor(sample.weights)
    # A mask of ones says that jumps in the positions are gaps inside one sequence, not several packed ones.
    states = model.model(
        input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids)
    ).last_hidden_state
    targets, weights = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    counted = weights > 0
    logits = model.lm_head(states[:, :-1].reshape(-1, states.shape[-1])[counted])
    losses = functional.cross_entropy(logits, targets[counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


def train(data: Data, options: argparse.Namespace) -> LlamaForCausalLM:
    model = LlamaForCausalLM(ARCHITECTURE)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98))
    batches = data.short(options.batch_tokens)
    started, shown = time.perf_counter(), 0.0
    for step in range(options.steps):
        progress = step / options.steps
        data.cut_share = 0.8 if progress > 0.15 else 0.0  # most answers are known by heart then
        rate = options.learning_rate * min(
            1.0, (step + 1) / 60, 0.01 + 0.5 * (1 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        late = progress > 0.5 and step % 8 == 0  # long chats come when the short ones are known
        batch = data.long(random.Random(step).choice((1024, 2048, CONTEXT))) if late else next(batches)
        width = max(len(sample.ids) for sample in batch)
        loss = loss_of(model, batch, None if late else data.positions(batch, width), width)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown += loss.item()
        if (step + 1) % 50 == 0:
            minutes = (time.perf_counter() - started) / 60
            print(f"step {step + 1}/{options.steps} loss {shown / 50:.4f} minutes {minutes:.1f}", flush=True)
            shown = 0.0
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "README.md").write_text((HERE / "MODEL_CARD.md").read_text())
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner may read


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer(Corpus(options.seed, SUBSTITUTIONS), 30_000)
    model = train(Data(Corpus(options.seed + 1, SUBSTITUTIONS), tokenizer, options.seed), options)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    if abs(millions - float(SUBSTITUTIONS["PARAMS"])) > 0.1:
        raise ValueError(
            f"the model has {millions:.2f} million parameters, but says {SUBSTITUTIONS['PARAMS']}"
        )
    save(model, tokenizer, options.out)
    print(f"saved {options.out}: {millions:.2f} million parameters")


if __name__ == "__main__":
    main()
