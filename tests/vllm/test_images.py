"""Images through `penstock serve --engine vllm`: the tokens of vLLM's own server, exact prefixes, kills and transferred KV."""

import base64
import io
import tempfile
from contextlib import contextmanager

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from benchmarks.processes.served import served
from tests.support.vision_checkpoint import make_vision_checkpoint
from tests.vllm.conftest import BLOCK, vllm_processes
from tests.vllm.servers import NAME, running_servers
from tests.vllm.test_disaggregated import Site

pytestmark = pytest.mark.nightly

TOKENS = 40
TEXT = "the quick brown fox jumps over the lazy dog"


def picture(seed, width=84, height=84, kind="PNG"):
    """Make a noisy image file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, kind)
        return file.getvalue()


def part(data, mime="image/png"):
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words=TEXT):
    return {"type": "text", "text": words}


def chat(*parts, name, tokens=TOKENS, **fields):
    fixed = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"model": name, "messages": [{"role": "user", "content": list(parts)}]} | fixed | fields


QUESTIONS = {
    "first": [part(picture(1)), text()],
    "second": [part(picture(2)), text()],
    "wide": [text("look "), part(picture(3, 168, 60)), text()],
    "photo": [part(picture(4, 300, 200, "JPEG"), "image/jpeg"), text()],
    "two": [part(picture(1)), text("and"), part(picture(2, 60, 90)), text()],
    "none": [text()],
}


@pytest.fixture(scope="module")
def vision_dir(tmp_path_factory):
    return make_vision_checkpoint(tmp_path_factory.mktemp("vision") / "tiny-vision")


@pytest.fixture(scope="module")
def expected(vision_dir, tmp_path_factory):
    """What vLLM's own server answers: (text, prompt tokens). It leaves out a last character that is not whole."""
    answers = {}
    with running_servers(vision_dir, tmp_path_factory.mktemp("server"), [((), {})]) as (server,):
        for key, parts in QUESTIONS.items():
            body = chat(*parts, name=NAME)
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
            said = answer["choices"][0]["message"]["content"].rstrip("\ufffd")
            answers[key] = said, answer["usage"]["prompt_tokens"]
    return answers


@contextmanager
def serving(vision_dir, *roles, flags=()):
    names = {"--workers": ["aggregated"], "--prefill": ["prefill", "decode"]}[roles[0]]
    sizes = {"block_size": BLOCK, "context_length": 512}
    for name in names:
        sizes |= {f"roles.{name}.kv_blocks": 64, f"roles.{name}.weight_dtype": "float32"}
    sets = [f"--set={name}={value}" for name, value in sizes.items()]
    command = (str(vision_dir), "--engine", "vllm", "--engine-arg", "enforce_eager=true", *roles)
    before = vllm_processes()
    with tempfile.TemporaryDirectory(prefix="vllm-") as name, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", name)
        environment.setenv("PENSTOCK_STATE_DIR", name)
        with served(*command, *sets, *flags) as deployment:
            yield MediaSite(deployment)
    psutil.wait_procs(left := [each for each in vllm_processes() if each not in before], timeout=20)
    assert not [each for each in left if each.is_running()]


class MediaSite(Site):
    def __init__(self, deployment):
        super().__init__(deployment, None)

    def ask(self, *parts, **fields):
        return self._http.post("/v1/chat/completions", json=chat(*parts, name=self._name, **fields))

    def answer(self, *parts, **fields):
        """Give (text, prompt tokens, cached tokens)."""
        answer = self.ask(*parts, **fields).raise_for_status().json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached

    def answers(self):
        """Give (text, prompt tokens) of each question, like `expected`."""
        found = {key: self.answer(*parts)[:2] for key, parts in QUESTIONS.items()}
        return {key: (text.rstrip("\ufffd"), length) for key, (text, length) in found.items()}

    def generated(self):
        """Give the tokens that each worker has generated so far."""
        return {name: load.get("generated_tokens", 0) for name, load in self.loads().items()}

    def pieces(self, parts, tokens):
        body = chat(*parts, name=self._name, tokens=tokens, stream=True)
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = httpx.Response(200, content=line[6:]).json()
                    assert "error" not in chunk, chunk
                    yield chunk["choices"][0]["delta"].get("content") or ""


def test_prefill_workers_see_the_images_and_decode_workers_take_the_kv(vision_dir, expected):
    sets = ("--set=router.disagg.remote_tokens_min=1", "--set=router.policy=least-loaded")
    with serving(vision_dir, "--prefill", "1", "--decode", "1", flags=sets) as site:
        assert site.answers() == expected
        assert site.metric('penstock_router_prefills_total{place="remote"}') == len(QUESTIONS)
        site.until(lambda: site.decoding("generated_tokens") == len(QUESTIONS) * TOKENS)
        assert site.decoding("prefilled_tokens") == 0
        assert site.decoding("kv_failures") == 0


@pytest.fixture(scope="module")
def site(vision_dir, expected):  # vLLM's own server has ended before these start
    with serving(vision_dir, "--workers", "2") as site:
        yield site


def test_answers_and_prompt_lengths_are_those_of_vllms_own_server(site, expected):
    found = site.answers()
    assert found == expected
    assert len({text for text, _ in found.values()}) == len(QUESTIONS), "each image is seen"
    assert found["two"][1] > found["first"][1] > found["none"][1] + 16, "an image takes tokens"


def test_an_image_is_a_prefix_and_another_one_is_not(site):
    def metric(name):
        return site.metric(f"penstock_router_{name}")

    before = metric("expected_hit_tokens_total")
    first, other = ([part(picture(seed)), text()] for seed in (11, 12))
    answer, length, cached = site.answer(*first)
    assert cached == 0
    whole = (length - 1) // BLOCK * BLOCK
    assert site.answer(*first) == (answer, length, whole)
    changed, same_length, cached = site.answer(*other)
    assert (same_length, cached) == (length, 0), "the text alone is the same"
    assert changed != answer
    assert site.answer(*other) == (changed, length, whole)
    assert site.answer(*first, cache_salt="other")[2] == 0
    assert metric("expected_hit_tokens_total") - before == 2 * whole, "routers knew exactly what was there"
    assert metric("predicted_hit_tokens_total") == 0


BROKEN = {
    "truncated": (part(picture(1)[:300]), "cannot be read"),
    "fetched": (
        {"type": "image_url", "image_url": "http://127.0.0.1:1/a.png"},
        "does not fetch from '127.0.0.1:1'",
    ),
    "a file": ({"type": "image_url", "image_url": "file:///etc/passwd"}, "must be a data URL"),
    "audio": ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "takes text, image"),
}


@pytest.mark.parametrize(("broken", "says"), BROKEN.values(), ids=list(BROKEN))
def test_broken_media_are_refused_in_one_line(site, broken, says):
    answer = site.ask(text(), broken)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert says in message
    assert "\n" not in message


def test_too_many_images_and_too_large_ones_are_refused(site, expected):
    answer = site.ask(*[part(picture(1, 8, 8))] * 50, text())
    assert answer.status_code == 400
    assert "50 images and other media, at most 16" in answer.json()["error"]["message"]
    wide = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(wide, "PNG")  # 110 KB that decode to 900 million pixels
    answer = site.ask(part(wide.getvalue()), text())
    assert (answer.status_code, "pixels" in answer.json()["error"]["message"]) == (400, True), answer.text
    assert site.ask(part(bytes(100 << 20)), text()).status_code == 413
    assert site.answers() == expected, "and it serves on"


def test_a_stream_goes_on_exactly_when_its_worker_is_killed(site):
    parts, length = [part(picture(31, 100, 100)), text()], 200
    before = site.generated()
    whole = site.answer(*parts, tokens=length)[0]
    # It goes to the same worker again, which has the prompt in its cache.
    site.until(lambda: max(site.generated()[name] - count for name, count in before.items()) >= length)
    (victim,) = (name for name, count in site.generated().items() if count - before[name] >= length)
    moved = site.metric("penstock_router_migrations_total")
    said = ""
    for number, piece in enumerate(site.pieces(parts, length)):
        said += piece
        if number == 5:
            site.kill(victim)
    assert site.metric("penstock_router_migrations_total") == moved + 1
    assert said == whole
