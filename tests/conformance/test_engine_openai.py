"""The engine suite on running servers: each engine has a fake server of its own."""

from typing import ClassVar

import pytest
from tokenizers import Tokenizer

from penstock.core.types.instances import EngineInfo
from penstock.demo import MODEL_NAME
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.server import EngineServer
from penstock.engine.openai.text import TextCodec
from penstock.testing.engines.engine import EngineSuite
from tests.support.fake_server import FakeServer
from tests.support.tokenizer import tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
CONFIG = ServerConfig(url=("http://127.0.0.1:1",))


class EngineWithServer(ServerEngine):
    """Starts its server first, and ends it last."""

    def __init__(self, fake: FakeServer, serving: Serving) -> None:
        self._fake = fake
        self._where = EngineServer("", CONFIG, (MODEL_NAME,), TextCodec(TOKENIZER))
        super().__init__(self._where, CONFIG, serving)

    async def start(self) -> EngineInfo:
        if not self._fake.url:
            self._where.url = self._where.connection.url = await self._fake.start()
        return await super().start()

    async def close(self) -> None:
        await super().close()
        await self._fake.stop()


class ServerSuite(EngineSuite):
    vocab_size = TOKENIZER.get_vocab_size()
    eos_token_ids = (0,)
    refuses_late = True
    token_exact_migration = False
    cached_tokens_late = True
    time_limit_s = 90.0  # each engine asks its server over sockets
    api: ClassVar[str] = "vllm"

    def make_engine(self, setup):
        fake = FakeServer(
            TOKENIZER, self.api, eos_share=40, token_s=0.0005, context_length=setup.context_length or 4096
        )
        serving = Serving(
            block_size=setup.block_size, context_length=setup.context_length or 4096, eos_token_ids=self.eos_token_ids, vocab_size=self.vocab_size,
            kv_blocks=setup.kv_blocks, max_running_requests=setup.max_running_requests,
            max_waiting_requests=setup.max_waiting_requests, max_batch_tokens=setup.max_batch_tokens,
        )  # fmt: skip
        return EngineWithServer(fake, serving)


class TestVllm(ServerSuite):
    api = "vllm"


@pytest.mark.nightly
@pytest.mark.slow
class TestTrtllm(ServerSuite):
    api = "trtllm"


@pytest.mark.nightly
@pytest.mark.slow
class TestSglang(ServerSuite):
    api = "sglang"


@pytest.mark.nightly
@pytest.mark.slow
class TestLlamaCpp(ServerSuite):
    api = "llamacpp"
    unsupported = frozenset({"min_tokens", "stop_token_ids"})


del ServerSuite
