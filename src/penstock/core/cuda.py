"""The GPUs that CUDA shows a process, as CUDA_VISIBLE_DEVICES lists them."""

from collections.abc import Mapping

from penstock.core.errors import ConfigError

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """List the GPUs that CUDA_VISIBLE_DEVICES leaves: indices, or names as `GPU-…` and `MIG-…`; None if it is not set.

    As in CUDA, the first entry that names no GPU, such as -1, ends the list.
    """
    if (listed := environ.get(CUDA_VISIBLE_DEVICES)) is None:
        return None
    names = [name.strip() for name in listed.split(",")]
    for number, name in enumerate(names):
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            return names[:number]
    return names


def worker_gpus(engine: str, first: int, count: int, environ: Mapping[str, str]) -> list[str]:
    """Name a worker's GPUs: `count` from the visible GPU number `first` on; indices where all GPUs are visible.

    Raises:
        ConfigError: fewer are visible.
    """
    names = visible_gpus(environ)
    wanted = range(first, first + count)
    if names is None:
        return [str(number) for number in wanted]
    if len(names) < wanted.stop:
        gpus = f"GPU {first}" if count == 1 else f"GPUs {first} to {wanted.stop - 1}"
        raise ConfigError(
            f"engine {engine}: the worker needs {gpus}, CUDA_VISIBLE_DEVICES has {len(names)}"
            f" ({environ[CUDA_VISIBLE_DEVICES]}); start fewer workers, or name more GPUs"
        )
    return names[first : wanted.stop]
