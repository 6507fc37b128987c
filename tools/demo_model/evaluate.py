"""Ask the demo model its questions, greedily and through the chat template, and count the expected phrases.

.venv/bin/python tools/demo_model/evaluate.py [--model DIR] [--questions FILE] [--history TURNS] [--ask "a question" ...]
"""

import argparse
import json
from pathlib import Path

import torch
from corpus import HELDOUT, Corpus
from train import MODEL_DIR, SUBSTITUTIONS
from transformers import AutoModelForCausalLM, AutoTokenizer


class Answerer:
    """One checkpoint, loaded as `transformers` loads any other."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)

    def answer(self, messages: list[dict[str, str]], max_new_tokens: int = 300) -> str:
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = self._model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
        return self._tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--questions", type=Path, default=HELDOUT)
    parser.add_argument("--system", help="a system prompt")
    parser.add_argument("--history", type=int, default=0, help="turns of a random chat before each question")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ask", nargs="+", help="ask these instead of the file's questions")
    parser.add_argument("--misses", action="store_true", help="show only answers without the expected phrase")
    options = parser.parse_args()

    torch.set_num_threads(1)
    answerer = Answerer(options.model, getattr(torch, options.dtype))
    items = json.loads(options.questions.read_text())
    if options.ask:
        items = [{"question": question, "expected": [""]} for question in options.ask]
    corpus = Corpus(99, SUBSTITUTIONS)
    passed = 0
    for item in items:
        system = [{"role": "system", "content": options.system}] if options.system else []
        history = corpus.conversation(options.history) if options.history else []
        answer = answerer.answer([*system, *history, {"role": "user", "content": item["question"]}])
        good = any(phrase.lower() in answer.lower() for phrase in item["expected"])
        passed += good
        if not (options.misses and good):
            print(f"{'ok  ' if good else 'MISS'} {item['question']}\n     {answer}")
    print(f"{passed} of {len(items)} answers contain the expected phrase")


if __name__ == "__main__":
    main()
