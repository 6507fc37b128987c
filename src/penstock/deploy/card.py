"""What a graph says to processes: the card of its model, and how long they may take to end."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.core.types.instances import ADDITIONAL_TEMPLATES, CHAT_TEMPLATE, CardFile, ModelCard, Role
from penstock.demo import MODEL_DIR, MODEL_NAME
from penstock.engine.paged.checkpoint import Checkpoint, refuse_absent
from penstock.engine.registry import engine_kind
from penstock.frontend.text.models import ServedModel, text_files
from penstock.graph import DEMO_MODEL, Graph, RoleSpec
from penstock.perf.model_config import known_shapes

_CONFIGS = ("generation_config.json", "config.json")
"""Files that frontends may fetch from a worker, beside those that make texts."""
_SALT_BYTES = 16
_log = get_logger()


def open_checkpoint(graph: Graph, roles: Mapping[Role, RoleSpec] | None = None) -> Checkpoint:
    """Open the graph's checkpoint; a hub name is downloaded, with its weights if a role reads them.

    Args:
        graph: names the model.
        roles: those that run here; None for all of the graph.

    Raises:
        ConfigError: the model does not exist, or has no tokenizer.
    """
    model = str(MODEL_DIR) if graph.model == DEMO_MODEL else graph.model
    reading = graph.roles.present() if roles is None else roles
    checkpoint = Checkpoint.open(model, weights=any(map(_reads_weights, reading.values())))
    if not (checkpoint.path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{checkpoint.path}: no tokenizer.json; save the model's tokenizer there in the fast format"
        )
    return checkpoint


def check_model(graph: Graph) -> None:
    """Check that the model can be served here, before any process or download starts.

    Raises:
        ConfigError: the directory does not exist, or the model is a shape without weights, for simulations only.
    """
    if graph.model == DEMO_MODEL:
        return
    if not Path(graph.model).is_dir():
        refuse_shape(graph.model)
    refuse_absent(graph.model)


def refuse_shape(model: str) -> None:
    """Refuse a name that has a shape and no weights.

    Raises:
        ConfigError: it is one.
    """
    if model != DEMO_MODEL and model in known_shapes():
        raise ConfigError(
            f"model: {model!r} is a shape for penstock simulate and penstock plan, without weights; name a checkpoint's"
            " directory or a hub name"
        )


def check_checkpoint(graph: Graph, roles: Mapping[Role, RoleSpec]) -> dict[Role, ModelCard]:
    """Make the model card of each role, if the checkpoint is on this machine; a hub name is not downloaded.

    Raises:
        ConfigError: a required file is missing or malformed, or the context is longer than the model's.
    """
    if graph.model != DEMO_MODEL and not Path(graph.model).expanduser().is_dir():
        return {}
    checkpoint = open_checkpoint(graph)
    return {name: make_card(checkpoint, graph, role) for name, role in roles.items()}


def served_name(graph: Graph) -> str:
    """Return the model name that clients use."""
    if graph.served_name:
        return graph.served_name
    if graph.model == DEMO_MODEL:
        return MODEL_NAME
    path = Path(graph.model).expanduser()
    return path.resolve().name if path.is_dir() else graph.model


def make_card(checkpoint: Checkpoint, graph: Graph, role: RoleSpec) -> ModelCard:
    """Make the model card of a role's workers.

    The salt covers the checkpoint's contents and the number formats: with equal salts, equal tokens have equal KV.

    Raises:
        ConfigError: a required file is missing or malformed, or the context is longer than the model's.
    """
    context_length = checkpoint.served_context(graph.context_length)
    contents = _card_files(checkpoint.path, graph.chat_template)
    files = tuple(
        CardFile(name=name, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
        for name, content in contents.items()
    )
    digest = hashlib.sha256(repr((files, role.weight_dtype, role.expert_dtype, role.kv_dtype)).encode())
    if _reads_weights(role):
        digest.update(checkpoint.revision())
        if checkpoint.has_long_factors(context_length):
            digest.update(b"long factors")
    card = ModelCard(
        name=served_name(graph),
        context_length=context_length,
        block_size=graph.block_size,
        salt=digest.digest()[:_SALT_BYTES],
        eos_token_ids=checkpoint.eos_token_ids,
        files=files,
        created_s=int(wall_time_s()),
        default_sampling=checkpoint.default_sampling,
    )
    end = _loaded(card, contents, checkpoint.path).turn_end()
    if end is None or end in card.eos_token_ids:
        return card
    _log.info("turn_end_found", model=card.name, token_id=end, others=card.eos_token_ids)
    return msgspec.structs.replace(card, eos_token_ids=(*card.eos_token_ids, end))


def _reads_weights(role: RoleSpec) -> bool:
    """Say whether a role's workers read the checkpoint's weights: mock engines and running servers do not."""
    return engine_kind(role.engine).has_weights


def _loaded(card: ModelCard, contents: dict[str, bytes], directory: Path) -> ServedModel:
    """Load the files as frontends do, so that a bad file fails at start and not at the first request."""
    try:
        return ServedModel(card, contents)
    except (ConfigError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).removeprefix(f"model {card.name}: ")
        raise ConfigError(f"{directory}: {reason}") from error


def _card_files(directory: Path, chat_template: str | None) -> dict[str, bytes]:
    """Read the files that frontends may fetch, by name; a chat template of the graph goes before those of the model."""
    configs = (directory / name for name in _CONFIGS)
    files = text_files(directory) | {path.name: path.read_bytes() for path in configs if path.is_file()}
    if chat_template is None:
        return files
    kept = {name: content for name, content in files.items() if not name.startswith(ADDITIONAL_TEMPLATES)}
    return kept | {CHAT_TEMPLATE: chat_template.encode()}


_KILL_AFTER_S = 5.0
"""Grace beyond a process's own drain timeout."""


def frontend_drain_s(graph: Graph) -> float:
    """Give the seconds that a frontend may take from SIGTERM to its end."""
    return graph.frontend.drain_timeout_s + _KILL_AFTER_S


def worker_drain_s(graph: Graph) -> float:
    """Give the seconds that a worker may take from SIGTERM to its end."""
    return graph.worker.drain_timeout_s + graph.supervision.close_timeout_s + _KILL_AFTER_S
