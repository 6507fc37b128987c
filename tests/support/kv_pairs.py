"""Workers of one model that may transfer KV, and the pairs that can."""

from penstock.core.ids import WorkerId
from penstock.core.types.instances import EngineInfo, Instance, ModelCard, Role
from penstock.core.types.kv import KvExchange, KvLayout
from penstock.router.fleet.links import KvTransferPairs
from tests.support.cluster import small_card

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16", element_bytes=2, block_size=4)
HERE = KvExchange(transports=("shm", "tcp"), listens=("memory", "unix"), host=b"one")
CARD = small_card()
_SETUPS_S = {"memory": 0.0, "shm": 0.025, "tcp": 0.1, "nixl": 1.0}


def worker(
    name: str,
    exchange: KvExchange | None = HERE,
    *,
    layout: KvLayout | None = LAYOUT,
    blocks: int = 10,
    tp: int = 1,
    card: ModelCard = CARD,
) -> Instance:
    """Make a prefill worker where the name begins with p, else a decode worker."""
    engine = EngineInfo(
        block_size=4,
        total_blocks=blocks,
        context_length=40,
        max_batch_tokens=8,
        max_running_requests=2,
        kv_layout=layout and layout.split(num_blocks=blocks, tp=tp),
    )
    role = Role.PREFILL if name[0] == "p" else Role.DECODE
    return Instance(
        worker_id=WorkerId(1), name=name, address="", role=role, card=card, engine=engine, exchange=exchange
    )


def pairs(*workers: Instance) -> KvTransferPairs:
    """Put workers into the slots from 0 on."""
    made = KvTransferPairs()
    for slot, instance in enumerate(workers):
        made.put(slot, instance)
    return made


def at(
    host: bytes = b"one",
    *,
    transports: tuple[str, ...] = HERE.transports,
    listens: tuple[str, ...] = HERE.listens,
) -> KvExchange:
    """Make what a worker on a host says of its transports."""
    return KvExchange(transports=transports, listens=listens, host=host)


def costly(
    *transports: str, host: bytes = b"one", listens: tuple[str, ...] = ("memory", "unix", "tcp")
) -> KvExchange:
    """Make what a worker says whose transports take time to be set up."""
    setups_s = tuple(_SETUPS_S[name] for name in transports)
    return KvExchange(transports=transports, listens=listens, host=host, setups_s=setups_s)
