"""Engines by the name that a graph or a flag gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.instances import Role
from penstock.engine.batched import BatchedEngine
from penstock.engine.mock.engine import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig

SIMULATED_ONLY = ("vllm", "sglang", "trtllm")
"""Engines that a graph may name for simulation; this version does not run them."""
_MOCK_BLOCKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A deployment's settings for an engine of any kind.

    The mock engine takes `context_length`, `vocab_size` and `eos_token_ids` from here. The paged engine reads them from its
    checkpoint; only a smaller `context_length` overrides that.
    """

    model: str
    """A directory with a checkpoint, or a name on the hub."""
    block_size: int
    context_length: int | None = None
    vocab_size: int = 32_000
    eos_token_ids: tuple[int, ...] = ()
    kv_blocks: int | None = None
    """None: the engine chooses."""
    sharing_engines: int = 1
    """Engines that take memory from this machine at the same time, this one included."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Bounds of batch and queue."""
    schedulers: Mapping[Role, SchedulerConfig] = field(default_factory=dict)
    """The same for roles that the worker may change to; `scheduler` for a role that is missing here."""
    dtype: str = "auto"
    device: str = "cpu"
    hash_key: bytes = DEFAULT_KEY
    mock: MockConfig = field(default_factory=MockConfig)


def create_engine(name: str, spec: EngineSpec) -> BatchedEngine:
    """Make an engine; `start` loads its model.

    Raises:
        ConfigError: there is no engine of this name, its packages are missing, or the spec contradicts it.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"engine: there is no {name!r}{nearest(name, list(_FACTORIES))}")
    engine = factory(spec)
    engine.by_role = spec.schedulers
    return engine


def engine_modules(name: str) -> tuple[str, ...]:
    """List the modules that making an engine imports, for spare processes that import them ahead of time."""
    return _MODULES.get(name, ())


def engine_names() -> tuple[str, ...]:
    return tuple(_FACTORIES)


def engine_dtypes(name: str) -> tuple[str, ...] | None:
    """List the dtypes that an engine of this name computes in; None: any."""
    return _DTYPES.get(name)


def _mock(spec: EngineSpec) -> BatchedEngine:
    if spec.context_length is None:
        raise ConfigError("context_length: the mock engine has no checkpoint to read it from; give it")
    shape = RunnerInfo(
        num_blocks=spec.kv_blocks or _MOCK_BLOCKS,
        block_size=spec.block_size,
        context_length=spec.context_length,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        kv_bytes_per_block=spec.mock.kv_bytes_per_block,
    )
    return mock_engine(shape, spec.mock, spec.scheduler, hash_key=spec.hash_key)


def _paged(spec: EngineSpec) -> BatchedEngine:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"engine paged: {' and '.join(missing)} not installed; run `pip install penstock[engine]`, or use engine mock"
        )
    from penstock.engine.paged.config import PagedConfig  # noqa: PLC0415 - its packages are an extra
    from penstock.engine.paged.engine import paged_engine  # noqa: PLC0415

    settings = {
        "model": spec.model,
        "device": spec.device,
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "kv_blocks": spec.kv_blocks,
        "sharing_engines": spec.sharing_engines,
        "context_length": spec.context_length,
    }
    config = PagedConfig.parse(settings, source="engine paged")
    return paged_engine(config, spec.scheduler, hash_key=spec.hash_key)


_MODULES = {"paged": ("penstock.engine.paged.engine",)}
_DTYPES = {"paged": ("auto", "float32", "bfloat16", "float16")}
_FACTORIES: dict[str, Callable[[EngineSpec], BatchedEngine]] = {"mock": _mock, "paged": _paged}
