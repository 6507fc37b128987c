"""Models loaded on first use, from files fetched by content."""

import asyncio

import msgspec
import pytest

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.cards import CardFile, ModelCard
from penstock.frontend.errors import UnknownModelError
from penstock.frontend.text.models import ModelCache
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card, tiny_model_files


def dispatcher(*names: str, **options) -> ScriptedDispatcher:
    return ScriptedDispatcher(speak([]), cards=[tiny_card(name) for name in names], **options)


async def test_a_model_is_loaded_once_for_all_who_ask_at_once() -> None:
    source = dispatcher("a")
    cache = ModelCache(source, models_max=2)
    models = await asyncio.gather(*(cache.get("a") for _ in range(5)))
    assert len({id(model) for model in models}) == 1
    assert source.fetches == 2


async def test_a_card_of_another_host_with_the_same_files_loads_nothing() -> None:
    source = dispatcher("a")
    cache = ModelCache(source, models_max=2)
    model = await cache.get("a")
    source.cards["a"] = msgspec.structs.replace(source.cards["a"], created_s=2)
    assert await cache.get("a") is model
    source.cards["a"] = msgspec.structs.replace(source.cards["a"], salt=b"another revision")
    assert await cache.get("a") is not model
    assert source.fetches == 4


async def test_an_unknown_model_names_those_that_are() -> None:
    with pytest.raises(UnknownModelError, match=r"model: 'c' does not exist here; models: a, b") as caught:
        await ModelCache(dispatcher("b", "a"), models_max=2).get("c")
    assert (caught.value.http_status, caught.value.param) == (404, "model")
    with pytest.raises(Unavailable, match="no worker is ready") as unavailable:
        await ModelCache(dispatcher(), models_max=2).get("c")
    assert unavailable.value.retry_after_s


async def test_a_model_whose_workers_were_never_reached_is_not_unknown() -> None:
    source = dispatcher("a")
    source.away = {"sql"}
    with pytest.raises(
        Unavailable, match=r"model: 'sql' has workers, but none can take requests now"
    ) as unavailable:
        await ModelCache(source, models_max=2).get("sql")
    assert unavailable.value.retry_after_s


async def test_a_model_whose_workers_are_away_is_remembered() -> None:
    source = dispatcher("a", "b")
    cache = ModelCache(source, models_max=2)
    model = await cache.get("a")
    source.cards.pop("a")
    assert await cache.get("a") is model
    with pytest.raises(UnknownModelError):
        cache.card("a")


async def test_the_one_unused_for_longest_makes_room() -> None:
    source = dispatcher("a", "b", "c")
    cache = ModelCache(source, models_max=2)
    for name in ("a", "b", "a", "c", "a"):
        await cache.get(name)
    assert source.fetches == 6
    await cache.get("b")
    assert source.fetches == 8


async def test_a_fetch_that_fails_is_tried_again_by_the_next() -> None:
    class Flaky(ScriptedDispatcher):
        async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
            if self.fetches == 0:
                self.fetches += 1
                raise Unavailable("no worker answered")
            return await super().fetch_file(card, file)

    cache = ModelCache(Flaky(speak([])), models_max=2)
    with pytest.raises(Unavailable):
        await cache.get("tiny")
    assert (await cache.get("tiny")).card.name == "tiny"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": b"{"}, r"model a: tokenizer.json: "),
        ({**tiny_model_files(), "tokenizer_config.json": b"["}, "tokenizer_config.json"),
        ({**tiny_model_files(), "chat_template.jinja": b"{% if %}"}, "chat template: line 1"),
    ],
)
async def test_malformed_files_are_named(files: dict[str, bytes], says: str) -> None:
    source = ScriptedDispatcher(speak([]), cards=[tiny_card("a", files)], files=files)
    with pytest.raises(ConfigError, match=says):
        await ModelCache(source, models_max=2).get("a")


async def test_adapters_share_all_that_was_loaded_of_their_model() -> None:
    source = dispatcher("a")
    for name in ("x", "y", "z"):
        source.cards[name] = source.cards["a"].adapted(name)
    cache = ModelCache(source, models_max=2)
    base, x, y = await cache.get("a"), await cache.get("x"), await cache.get("y")
    assert source.fetches == 2
    assert x.tokenizer is y.tokenizer is base.tokenizer
    assert [(m.card.name, m.card.parent) for m in (base, x, y)] == [("a", None), ("x", "a"), ("y", "a")]
    del source.cards["x"]
    assert (await cache.get("x")).card == x.card, "its workers may be back soon"
    await cache.get("z")
    await cache.get("x")
    del source.cards["y"]
    with pytest.raises(UnknownModelError, match=r"model: 'y' does not exist here; models: a, z"):
        await cache.get("y")
