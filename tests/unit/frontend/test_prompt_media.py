"""Media of a request: bounds, digests in block hashes, and what is refused before anything is sent."""

import asyncio
import base64
import random
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import Overloaded, PenstockError, RequestError
from penstock.core.types.instances import ModelCard
from penstock.core.types.requests import MediaItem, MediaKind
from penstock.core.wire import token_list
from penstock.frontend.apis.chat import CHAT
from penstock.frontend.config import FrontendConfig, MediaConfig, MediaFetchConfig
from penstock.frontend.frontend import Frontend, PendingAnswer
from penstock.frontend.http.admin import PromptBody, prefix_of
from penstock.frontend.limits.headers import NO_OPTIONS
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card

KINDS = (
    MediaKind(modality="image", placeholder="<image>", items_max=9),
    MediaKind(modality="audio", placeholder="<{n}>", items_max=2),
)
TEXT = {"type": "text", "text": "the quick brown fox"}


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes = b"picture", kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data, kind)}}


class Scene:
    def __init__(self, card: ModelCard, media: MediaConfig) -> None:
        self.dispatcher = ScriptedDispatcher(speak([1]), [card])
        config = FrontendConfig(media=media)
        self.registry = CollectorRegistry()
        self.frontend = Frontend(
            config, self.dispatcher, hash_key=bytes(16), rng=random.Random(0), registry=self.registry
        )

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)

    def ask(self, *parts: dict[str, Any], then: Any = None, **fields: Any) -> PendingAnswer:
        """Prepare a chat; `then` is called with the answer before the request ends."""

        async def main() -> PendingAnswer:
            body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]} | fields
            with self.frontend.arrive() as slot:
                self.frontend.admit(slot)
                answer = await self.frontend.generate([msgspec.json.encode(body)], slot, NO_OPTIONS, CHAT)
                if then is not None:
                    then(answer)
            await self.frontend.close()
            return answer

        return asyncio.run(main())

    def refusal(
        self, *parts: dict[str, Any], kind: type[PenstockError] = RequestError, **fields: Any
    ) -> PenstockError:
        with pytest.raises(kind) as refused:
            self.ask(*parts, **fields)
        assert "\n" not in refused.value.message
        assert not self.dispatcher.opened
        assert not self.metric("penstock_frontend_media_bytes"), "what a refused request held is given back"
        return refused.value


def scene(kinds: tuple[MediaKind, ...] = KINDS, **media: Any) -> Scene:
    return Scene(msgspec.structs.replace(tiny_card(), media=kinds), MediaConfig(**media))


def test_a_request_carries_the_expanded_prompt_and_the_files() -> None:
    here = scene()
    (request,) = here.ask(image(b"one"), TEXT, image(b"two")).prepared.requests
    (prompt,) = here.dispatcher.expanded
    assert request.media is not None
    assert [item.data for item in request.media.items] == [b"one", b"two"]
    assert request.media.token_ids == prompt.token_ids
    count = len(token_list(prompt.token_ids))
    assert [item.position for item in request.media.items] == [count, count + 10]
    assert len(token_list(request.token_ids)) == count + 20
    assert len(request.block_hashes) == (count + 20) // 16 * 16


def test_block_hashes_differ_from_the_block_on_where_another_image_begins() -> None:
    def hashes(*parts: dict[str, Any]) -> bytes:
        return scene().ask(*parts).prepared.requests[0].block_hashes

    words = {
        "type": "text",
        "text": "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3,
    }
    one, two = hashes(image(b"one"), words), hashes(image(b"two"), words)
    assert one == hashes(image(b"one"), words)
    assert len(one) == len(two)
    assert one[:32] == two[:32], "text before the images"
    assert one[-16:] != two[-16:]


def test_a_large_body_goes_through_an_encoder_process() -> None:
    data = random.Random(1).randbytes(200_000)
    (request,) = scene().ask(image(data), TEXT).prepared.requests
    assert request.media is not None
    assert request.media.items[0].data == data
    assert request.media.items[0].digest == MediaItem.of("image", data).digest


def test_templates_of_strings_get_placeholders_before_the_text() -> None:
    here = scene()
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    here.ask(TEXT, image(), audio, audio)
    model = asyncio.run(here.frontend.served_model("tiny"))
    text = model.tokenizer.decode(
        token_list(here.dispatcher.expanded[0].token_ids), skip_special_tokens=False
    )
    assert text == "<|user|><image>\n<1>\n<2>\nthe quick brown fox<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "has no data"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "without base64 data"),
        (image(kind="text/html"), "must be of a type image/..., got 'text/html'"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data URL"),
        ({"type": "image_url", "image_url": "https://example.com/a.png"}, "does not fetch from 'example.com'"),
        ({"type": "image_url"}, "image_url: required, but missing"),
        ({"type": "video_url", "video_url": {"url": url_of(b"x", "video/mp4")}}, "takes text, audio, image where it runs, no video"),
        ({"type": "file", "file": {}}, "'file' is not supported"),
    ],
)  # fmt: skip
def test_bad_parts_are_refused_by_their_place(part: dict[str, Any], says: str) -> None:
    error = scene().refusal(TEXT, part)
    assert error.http_status == 400
    assert says in error.message
    assert str(error.param).startswith("messages[0].content[1]")


def test_pins_and_prefetches_are_of_text_only() -> None:
    model = asyncio.run(scene().frontend.served_model("tiny"))
    messages = [{"role": "user", "content": [TEXT | {"text": "the quick " * 20}, image()]}]
    body = msgspec.convert({"messages": messages}, PromptBody)
    with pytest.raises(RequestError, match=r"messages\[0\].content\[1\].image_url: .* text only"):
        prefix_of(body, model, "pin", hash_key=bytes(16))


def test_items_and_bytes_are_bounded() -> None:
    assert "3 images and other media, at most 2" in scene(items_max=2).refusal(*[image()] * 3).message
    assert "10 parts with image, model 'tiny' takes at most 9" in scene().refusal(*[image()] * 10).message
    error = scene(request_bytes_max=2000).refusal(image(bytes(1500)), n=2)
    assert (error.http_status, "1500 bytes of media for 2 choices" in error.message) == (413, True)
    assert scene(request_bytes_max=3000).ask(image(bytes(1500)), n=2).prepared.requests[1].media is not None


def test_requests_in_flight_share_a_bound() -> None:
    here = scene(bytes_max=2000)
    refused = []

    def second(_answer: PendingAnswer) -> None:
        assert here.metric("penstock_frontend_media_bytes") == 1500

        async def main() -> None:
            with here.frontend.arrive() as slot:
                body = {"model": "tiny", "messages": [{"role": "user", "content": [image(bytes(501))]}]}
                await here.frontend.generate([msgspec.json.encode(body)], slot, NO_OPTIONS, CHAT)

        try:
            main().send(None)
        except Overloaded as error:
            refused.append(error)

    here.ask(image(bytes(1500)), then=second)
    (error,) = refused
    assert error.retry_after_s
    assert "frontend.media.bytes_max" in error.message
    assert here.metric("penstock_frontend_media_bytes") == 0
    here.ask(image(bytes(1999)))


def test_a_prompt_that_expands_beyond_the_context_is_refused() -> None:
    assert (
        "do not fit the model's context"
        in scene().refusal(TEXT | {"text": "w " * 240}, image(), image()).message
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "[::1]", "[::ffff:a00:1]", "169.254.169.254"])
def test_an_allowed_host_may_have_no_private_address(host: str) -> None:
    hosts = (f"{host}:9", "example.com")
    part = {"type": "image_url", "image_url": f"http://{host}:9/a.png"}
    error = scene(fetch=MediaFetchConfig(hosts=hosts)).refusal(part)
    assert error.http_status == 400
    assert "no public address" in error.message


@pytest.mark.parametrize(
    "host", ["", "http://example.com", "example.com/a", "example.com:x", "a@b", "a:70000"]
)
def test_hosts_of_the_configuration_are_checked(host: str) -> None:
    with pytest.raises(ValueError, match="is no host; expected NAME or NAME:PORT"):
        MediaFetchConfig(hosts=(host,))


def test_a_host_without_a_port_is_asked_at_the_usual_ones() -> None:
    config = MediaFetchConfig(hosts=("Example.com", "::1", "[::1]:8080"))
    assert config.places == {
        ("example.com", 80),
        ("example.com", 443),
        ("::1", 80),
        ("::1", 443),
        ("::1", 8080),
    }
