"""A checkpoint on disk: its path, its JSON files, and a digest of its content. Needs no PyTorch."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from penstock.core.errors import ConfigError

REVISION_BYTES = 16
_GENERATION = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_WEIGHTS = "*.safetensors"
_FILES = ["*.json", _WEIGHTS, "*.jinja", "*.model", "tokenizer*"]
_POINTER, _POINTER_BYTES_MAX = b"version https://git-lfs.github.com/spec/", 1024
_SAMPLE_BYTES = 64 << 10
_SAMPLES_MAX = 512
"""Evenly spread samples of a weight file above 32 MiB: reading them takes 0.1 s, reading the whole file a minute."""
_SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "top_p": (0, 1),
    "top_k": (-1, (1 << 31) - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.001, 1000),
}
"""Sampling settings of generation_config.json, and the values that engines take: any other has each request refused that gives none."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A local checkpoint in Hugging Face's layout.

    name:       as the user gave it
    config:     config.json
    generation: generation_config.json; empty if there is none
    """

    path: Path
    name: str
    config: dict[str, Any] = field(repr=False)
    generation: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, model: str, *, weights: bool = True) -> Self:
        """Open a directory, or download any other name from the Hugging Face hub (or find it in the hub's cache).

        Args:
            model: directory or hub name.
            weights: whether to download the weights too.

        Raises:
                ConfigError: there is no such directory or repository, it has no config.json, or a file is a pointer of Git LFS.
        """
        path = Path(model).expanduser()
        if not path.is_dir():
            path = _download(model, weights=weights)
        _refuse_pointers(path, _patterns(weights=weights))
        config = _read_json(path / "config.json")
        if config is None:
            raise ConfigError(f"{path}: no config.json; expected a directory with a Hugging Face checkpoint")
        return cls(path, model, config, _read_json(path / _GENERATION) or {})

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of config.json; multimodal models nest it."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def context_length(self) -> int:
        """Tokens of context that the model supports.

        Raises:
            ConfigError: config.json has no valid `max_position_embeddings`.
        """
        length = self.text_config.get("max_position_embeddings")
        if not isinstance(length, int) or length < 1:
            raise ConfigError(
                f"{self.path / 'config.json'}: max_position_embeddings: must be a number of tokens, got {length!r}"
            )
        return length

    def served_context(self, asked: int | None) -> int:
        """Return the context length to serve: `asked`, or the model's own if None.

        Raises:
            ConfigError: `asked` exceeds the model's own, or config.json does not say that.
        """
        limit = self.context_length
        if asked is not None and asked > limit:
            raise ConfigError(f"context_length: must be <= {limit}, the model's own, got {asked}")
        return asked or limit

    def has_long_factors(self, context_length: int) -> bool:
        """Say whether this context length uses the long one of a model's two sets of rotary factors (longrope).

        All requests use the same set, as in vLLM: keys must not depend on other rows or on the final length of a request.
        """
        config = self.text_config
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
        limits = [
            config.get("original_max_position_embeddings") or kind.get("original_max_position_embeddings")
            for kind in kinds
            if "long_factor" in kind
        ]
        return any(isinstance(limit, int) and context_length > limit for limit in limits)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens: all that generation_config.json, config.json and the tokenizer's files name.

        Raises:
            ConfigError: `eos_token_id` is no token id or list of token ids, or a file is no JSON.
        """
        token_ids: dict[int, None] = {}
        for file, source in (
            (_GENERATION, self.generation), ("config.json", self.text_config), ("config.json", self.config),
        ):  # fmt: skip
            found = source.get("eos_token_id")
            if found is None:
                continue
            each = found if isinstance(found, list) else [found]
            if not all(type(token_id) is int and token_id >= 0 for token_id in each):
                raise ConfigError(
                    f"{self.path / file}: eos_token_id: must be a token id or a list of them, got {found!r}"
                )
            token_ids |= dict.fromkeys(each)
        return tuple(token_ids | dict.fromkeys(self._tokenizer_ends()))

    def _tokenizer_ends(self) -> Iterator[int]:
        """Give the ids of the end-of-sequence tokens that the tokenizer's files name by their text."""
        named = set()
        for name in _TOKENIZER_FILES:
            token = (_read_json(self.path / name) or {}).get("eos_token")
            named.add(token.get("content") if isinstance(token, dict) else token)
        named.discard(None)
        file = self.path / "tokenizer.json"
        if not named or not file.is_file():
            return
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{file}: {error}") from error
        for token in sorted(filter(None, map(str, named))):
            if (token_id := tokenizer.token_to_id(token)) is not None:
                yield token_id

    @property
    def default_sampling(self) -> tuple[tuple[str, float], ...]:
        """The model's own sampling settings as (name, value); greedy with `do_sample: false`.

        Raises:
            ConfigError: a value is no finite number, or beyond its bounds.
        """
        if self.generation.get("do_sample") is False:
            return (("temperature", 0.0),)
        said = {key: value for key in _SAMPLING if (value := self.generation.get(key)) is not None}
        for key, value in said.items():
            if type(value) not in {int, float} or not math.isfinite(value):
                raise ConfigError(f"{self.path / _GENERATION}: {key}: must be a finite number, got {value!r}")
            low, high = _SAMPLING[key]
            if not low <= value <= high:
                raise ConfigError(
                    f"{self.path / _GENERATION}: {key}: must be >= {low} and <= {high}, got {value!r}; correct it, or leave it out"
                )
        return tuple((key, float(value)) for key, value in said.items())

    def weight_files(self) -> list[Path]:
        """List the safetensors files.

        Raises:
            ConfigError: there are none, or the index names one that is missing.
        """
        index_path = self.path / "model.safetensors.index.json"
        index = _read_json(index_path)
        if index is not None:
            files = [self.path / name for name in sorted(set(index.get("weight_map", {}).values()))]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise ConfigError(
                    f"{index_path}: {len(missing)} of {len(files)} weight files are missing, such as {missing[0]};"
                    " copy or download them again"
                )
            return files
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            pickled = next(self.path.glob("*.bin"), None)
            hint = f"; {pickled.name} is a pickle, save it as safetensors" if pickled else ""
            raise ConfigError(f"{self.path}: no weights, expected *.safetensors{hint}")
        return files

    def revision(self) -> bytes:
        """Digest configuration and weights, for the salt of block hashes.

        Equal content gives equal bytes on every host and path. Of a weight file above `_SAMPLES_MAX` x `_SAMPLE_BYTES` only
        evenly spread samples are read, so an edit between samples goes unnoticed. That is enough for caches that live as
        long as their workers, but not for KV that outlives them.
        """
        digest = hashlib.blake2b(digest_size=REVISION_BYTES)
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        for file in self.weight_files():
            digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
            for sample in _samples(file):
                digest.update(sample)
        return digest.digest()


def refuse_absent(model: str) -> None:
    """Refuse a path that is no directory; hub names are not looked up.

    Raises:
        ConfigError: there is no such directory.
    """
    if Path(model).expanduser().is_dir():
        return
    if Path(model).expanduser().exists():
        raise ConfigError(
            f"model: {model} is not a directory; expected a checkpoint's directory or a hub name"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"model: no such directory: {model}; expected a checkpoint's directory or a hub name"
        )


def _patterns(*, weights: bool) -> list[str]:
    return _FILES if weights else [pattern for pattern in _FILES if pattern != _WEIGHTS]


def _refuse_pointers(directory: Path, patterns: list[str]) -> None:
    """Refuse files that Git LFS left as pointers of some 130 bytes to their content."""
    files = {file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}
    pointers = sorted(
        file.name
        for file in files
        if file.stat().st_size <= _POINTER_BYTES_MAX and file.read_bytes().startswith(_POINTER)
    )
    if pointers:
        raise ConfigError(
            f"{directory}: {len(pointers)} of its files are pointers of Git LFS without the content, such as {pointers[0]};"
            " run git lfs pull there, or download the model again"
        )


def _download(model: str, *, weights: bool) -> Path:
    refuse_absent(model)
    try:
        import huggingface_hub  # noqa: PLC0415 - needed for hub names only, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"model: {model!r} is no directory, and loading it from the hub needs the extra: pip install 'penstock-llm[engine]'"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_patterns(weights=weights)))
    except (OSError, ValueError) as error:
        reason = _reason(error)
        raise ConfigError(
            f"model: {model!r} is no directory here, and the Hugging Face hub did not give it ({reason});"
            " name a directory with config.json and *.safetensors"
        ) from error


def _reason(error: BaseException) -> str:
    """Describe the innermost cause in one short line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        line = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{file}: {line}not JSON ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must be a JSON object, got {type(data).__name__}")
    return data


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    count = min(_SAMPLES_MAX, -(-size // _SAMPLE_BYTES))
    with file.open("rb") as stream:
        for index in range(count):
            start = (
                index * _SAMPLE_BYTES
                if count < _SAMPLES_MAX
                else index * (size - _SAMPLE_BYTES) // (count - 1)
            )
            stream.seek(start)
            yield stream.read(_SAMPLE_BYTES)
