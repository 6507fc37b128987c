"""A model on disk: where it is, what its files say, and a name for exactly these contents."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.types import CardFile, ModelCard
from penstock.graph import DEMO_MODEL, Graph, RoleSpec

CARD_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""What a frontend may fetch from a worker."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_HUB_FILES = (*CARD_FILES, "*.safetensors", "*.safetensors.index.json", "tokenizer.model")
_FILE_BYTES_MAX = 256 << 20  # a tokenizer.json of 256k tokens has 33 MB


def find_model(model: str) -> Path:
    """Return the directory of a model, downloading it if it is a name on the Hugging Face hub.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded.
    """
    if model == DEMO_MODEL:
        from penstock.demo import MODEL_DIR  # noqa: PLC0415 - only the demo needs it

        return Path(MODEL_DIR)
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ConfigError(
            f"model: {model} is a file; give the directory that holds config.json and the weights"
        )
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise ConfigError(
            f"model: there is no directory {model}; give a model directory, a hub name such as Qwen/Qwen3-0.6B, or --demo"
        )
    return _download(model)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with the engine, and takes a second
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"model: there is no directory {name}, and to download it needs: pip install 'penstock[engine]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model: neither a directory nor the hub has {name}; a private one needs HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model: there is no directory {name}, and the hub cannot be reached; check the name or the network"
        ) from error
    except Exception as error:  # its network library raises many kinds
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model: {name} cannot be downloaded: {reason or type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model directory, read once by the supervisor."""

    directory: Path
    name: str
    config: dict[str, Any]
    generation: dict[str, Any]
    files: tuple[CardFile, ...]

    @classmethod
    def read(cls, directory: Path, name: str) -> Self:
        """Read the small files.

        Raises:
            ConfigError: one that is needed is missing, or malformed.
        """
        for needed in ("config.json", "tokenizer.json"):
            if not (directory / needed).is_file():
                raise ConfigError(
                    f"{directory}: no {needed}; a model directory holds config.json, tokenizer.json and weights"
                )
        return cls(
            directory,
            name,
            _read_json(directory / "config.json"),
            _read_json(directory / "generation_config.json")
            if (directory / "generation_config.json").is_file()
            else {},
            tuple(_card_files(directory)),
        )

    def weight_files(self) -> list[Path]:
        """List the weights.

        Raises:
            ConfigError: there are none.
        """
        found = sorted(self.directory.glob("*.safetensors"))
        if not found:
            others = sorted(self.directory.glob("*.bin")) + sorted(self.directory.glob("*.gguf"))
            hint = f"; {others[0].name} is of another kind, convert it" if others else ""
            raise ConfigError(f"{self.directory}: no weights (*.safetensors){hint}; --engine mock needs none")
        return found

    def revision(self, *, weights: bool) -> bytes:
        """Name the contents, 32 bytes: equal revisions compute equal KV.

        Reads every weight, about a second per gigabyte, except those that the hub's cache names by their content.

        Raises:
            ConfigError: there are no weights.
        """
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.sha256}\0".encode())
        for path in self.weight_files() if weights else ():
            digest.update(f"{path.name}\0{_sha256(path)}\0".encode())
        return digest.digest()

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together that the model was made for.

        Raises:
            ConfigError: the config does not say.
        """
        for config in (self.config, self.config.get("text_config", {})):
            if isinstance(length := config.get("max_position_embeddings"), int) and length > 0:
                return length
        raise ConfigError(
            f"{self.directory}/config.json: max_position_embeddings: missing; it says the context length"
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        for source in (self.generation, self.config, self.config.get("text_config", {})):
            ids = source.get("eos_token_id")
            if isinstance(ids, int):
                return (ids,)
            if isinstance(ids, list) and ids:
                return tuple(ids)
        return ()

    def default_sampling(self) -> tuple[tuple[str, float], ...]:
        """Give the model's own sampling defaults; one that says it does not sample is greedy."""
        values = {key: self.generation[key] for key in _SAMPLING if self.generation.get(key) is not None}
        if self.generation.get("do_sample") is False:
            values["temperature"] = 0.0
        return tuple((key, float(value)) for key, value in values.items())

    def card(self, graph: Graph, role: RoleSpec) -> ModelCard:
        """Describe the model as the workers of `role` serve it; slow, for it reads the weights."""
        revision = self.revision(weights=role.engine != "mock")
        salt = hashlib.sha256(revision + f"{role.weight_dtype}\0{role.kv_dtype}".encode())
        return ModelCard(
            name=self.name,
            context_length=self.context_length,
            block_size=graph.block_size,
            salt=salt.digest()[:16],
            eos_token_ids=self.eos_token_ids,
            files=self.files,
            created_s=int(wall_time_s()),
            default_sampling=self.default_sampling(),
        )


def served_name(graph: Graph, directory: Path) -> str:
    """Return what clients call the model."""
    if graph.served_name:
        return graph.served_name
    if graph.model == DEMO_MODEL:
        from penstock.demo import MODEL_NAME  # noqa: PLC0415 - as above

        return MODEL_NAME
    return directory.name if Path(graph.model).expanduser().is_dir() else graph.model


def _card_files(directory: Path) -> Iterator[CardFile]:
    for name in CARD_FILES:
        path = directory / name
        if path.is_file():
            size_bytes = path.stat().st_size
            if size_bytes > _FILE_BYTES_MAX:
                raise ConfigError(f"{path}: must have at most {_FILE_BYTES_MAX} bytes, has {size_bytes}")
            yield CardFile(
                name=name, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size_bytes=size_bytes
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a JSON object: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error


def _sha256(path: Path) -> str:
    target = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", target):  # the hub's cache: a link to blobs/<sha256>
        return target
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
