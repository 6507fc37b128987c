"""Constrained answers of the paged engine: always valid, whatever the model, the schema, and where the sequence has been."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import RequestError
from tests.unit.engine.paged.conftest import make_request

torch = pytest.importorskip("torch")

from tokenizers import Tokenizer  # noqa: E402

from penstock.engine.paged.structured import (  # noqa: E402
    Grammars,
    Matchers,
)
from penstock.engine.scheduling.sequences import SequenceTable  # noqa: E402

pytestmark = pytest.mark.engine
EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = list(range(20, 60))


def constraint(kind: str, value: Any) -> bytes:
    return json.dumps({kind: value}).encode()


def constrained(name: str, structured: bytes, *, max_tokens: int = 300, **params: Any) -> Any:
    params = {"temperature": 1.0, "seed": 3, "ignore_eos": False, **params}
    return make_request(name, PROMPT, max_tokens, structured=structured, **params)


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint("llama") / "tokenizer.json"))


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    assert token_ids[-1] == EOS, "the answer did not come to its end"
    return tokenizer.decode(token_ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5, "min_p": 0.01},
        *(
            pytest.param(params, marks=pytest.mark.nightly)
            for params in ({}, {"temperature": 0.0}, {"top_p": 0.7})
        ),
    ],
)
def test_a_random_model_keeps_to_a_schema(engine, tokenizer, params):
    manual = engine()
    requests = [constrained(f"s{seed}", constraint("json", PERSON), seed=seed, **params) for seed in range(6)]
    free = make_request("free", PROMPT, 40, temperature=1.0, seed=5)
    tokens = manual.run(*requests, free)
    for request in requests:
        jsonschema.validate(json.loads(text_of(tokenizer, tokens[request.request_id])), PERSON)
    assert tokens["free"] == engine().run(free)["free"]  # those beside constrained ones are as ever


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", r"[a-c]{2}-\d{3}", r"[a-c]{2}-\d{3}"),
        ("choice", ["left", "right", 'a "quoted" \\ one', "你好"], r'left|right|a "quoted" \\ one|你好'),
        ("grammar", 'root ::= "yes" | "no" [0-9]', r"yes|no[0-9]"),
        ("grammar", 'start: "yes" | "no" /[0-9]/', r"yes|no[0-9]"),
    ],
)
def test_a_random_model_keeps_to_other_constraints(engine, tokenizer, kind, value, pattern):
    requests = [constrained(f"s{seed}", constraint(kind, value), seed=seed) for seed in range(8)]
    tokens = engine().run(*requests)
    texts = {text_of(tokenizer, tokens[request.request_id]) for request in requests}
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert len(texts) > 1


def test_a_sequence_that_moved_goes_on_with_its_grammar(engine, tokenizer):
    structured = constraint("json", PERSON)
    whole = engine().run(constrained("r", structured))["r"]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        moved = make_request(
            "r", PROMPT + whole[:cut], 300, num_emitted=cut, structured=structured, temperature=1.0, seed=3,
            ignore_eos=False,
        )  # fmt: skip
        assert engine().run(moved)["r"] == whole[cut:]


def test_a_sequence_from_elsewhere_that_does_not_match_ends_with_an_error(engine):
    manual = engine()
    moved = make_request(
        "r", [*PROMPT, 7, 7], 30, num_emitted=2, structured=constraint("regex", "[0-9]{3}"), ignore_eos=False
    )
    manual.submit(moved)
    with pytest.raises(AssertionError, match="does not match its grammar"):
        manual.step()
    assert manual.scheduler.load().running_requests == 0


def test_a_complete_text_before_min_tokens_is_followed_by_nothing(engine, tokenizer):
    tokens = engine().run(constrained("r", constraint("choice", ["ab"]), min_tokens=12))["r"]
    assert len(tokens) >= 12
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "ab"


# --- other limits of what is sampled


def test_biases_and_allowed_tokens_choose(engine):
    manual = engine()
    free = manual.run(make_request("free", PROMPT, 8))["free"]
    kept = manual.run(make_request("bias", PROMPT, 8, logit_bias=((77, 1000.0),)))["bias"]
    assert kept == [77] * 8
    without = manual.run(make_request("less", PROMPT, 8, logit_bias=((free[0], -1000.0),)))["less"]
    assert free[0] not in without
    few = manual.run(make_request("few", PROMPT, 40, allowed_token_ids=(5, 9, 400), temperature=1.0, seed=1))[
        "few"
    ]
    assert set(few) == {5, 9, 400}
    assert manual.run(make_request("again", PROMPT, 8))["again"] == free


def test_words_are_left_out(engine):
    manual = engine()
    free = manual.run(make_request("free", PROMPT, 6))["free"]
    single = manual.run(make_request("single", PROMPT, 6, bad_words=((free[0],),)))["single"]
    assert free[0] not in single
    pair = manual.run(make_request("pair", PROMPT, 6, bad_words=((free[0], free[1]), (free[1], free[0]))))[
        "pair"
    ]
    assert pair[0] == free[0]
    assert pair[1] != free[1]
    moved = make_request("moved", [*PROMPT, free[0]], 6, num_emitted=1, bad_words=((free[0], free[1]),))
    assert manual.run(moved)["moved"][0] != free[1]
    prompt_ends = make_request("end", [*PROMPT, free[0]], 6, bad_words=((free[0], free[1]),))
    assert manual.run(prompt_ends)["end"][0] == free[1]  # a word begun by the prompt is no word of the answer


def test_limits_that_leave_nothing_end_the_request_alone(engine):
    manual = engine()
    manual.submit(
        make_request("none", PROMPT, 6, allowed_token_ids=(7,), bad_words=((7,),)),
        make_request("free", PROMPT, 2),
    )
    with pytest.raises(AssertionError, match="leave no token"):
        manual.step()
    assert manual.scheduler.load().running_requests == 1


# --- what is refused


@pytest.fixture
def grammars(checkpoint) -> Grammars:
    found = Grammars()
    assert found.open(checkpoint("llama"), 512, (EOS,))
    return found


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE = {
    "nested": ("json", deep(100)),
    "enum": ("json", {"enum": [f"value number {index}" for index in range(80_000)]}),
    "own reference": ("json", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "not": ("json", {"not": {}}),
    "type": ("json", {"type": "blorp"}),
    "no schema": ("json", 7),
    "look-ahead": ("regex", "(?=a)b"),
    "number": ("regex", 3),
    "no choices": ("choice", []),
    "unknown rule": ("grammar", "start: foo"),
    "long grammar": ("grammar", "start: " + '"a" | ' * 20_000 + '"a"'),
    "kind": ("structural_tag", {"structures": []}),
    "no character": ("regex", r"[^\s\S]"),
    "endless rule": ("grammar", 'start: x\nx: x "a"'),
    "options that overlap": ("json", {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_in_words(grammars, name):
    request = constrained("r", constraint(*HOSTILE[name]))
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError, match=r"^response_format: ") as caught:
            grammars.prepare(request)
        assert caught.value.http_status == 400
        assert len(caught.value.message) < 600
        assert "\n" not in caught.value.message
        assert not re.search("NoExtension|coerce|option '|Unimplemented", caught.value.message)
    assert not grammars.is_ready(request)


@pytest.mark.parametrize("structured", [b"", b"[]", b"{", b"{}", b'{"regex": "' + b"a" * (1 << 20) + b'"}'])
def test_malformed_constraints_are_refused(grammars, structured):
    with pytest.raises(RequestError, match="response_format: "):
        grammars.prepare(constrained("r", structured))


def test_the_oldest_grammars_are_dropped_and_compiled_again(grammars):
    structured = [constraint("regex", f"a{number}") for number in range(515)]
    for each in (*structured[:511], structured[0], *structured[511:]):
        grammars.prepare(constrained("r", each))
    ready = [grammars.is_ready(constrained("r", each)) for each in structured]
    assert ready == [True, False, False, False, *[True] * 511], "512 are kept"
    grammars.matcher(structured[1])  # of a sequence that comes back late
    assert grammars.is_ready(constrained("r", structured[1]))


# --- any schema, any choice of tokens

SCALARS = st.sampled_from(
    [
        {"type": "string", "maxLength": 6},
        {"type": "integer", "minimum": -3, "maximum": 999},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["x", 3, None, "a b"]},
        {"const": "ü"},
        {"type": "string", "pattern": "^[a-z]{1,4}$"},
        {"type": ["string", "null"], "maxLength": 3},
    ]
)


def objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["a", "b", "c d", "é", 'q"q']), unique=True, max_size=3)
    return st.builds(
        lambda keys, of, needed: {
            "type": "object",
            "properties": dict(zip(keys, of, strict=False)),
            "required": keys[:needed],
            "additionalProperties": False,
        },
        names,
        st.lists(children, min_size=3, max_size=3),
        st.integers(0, 3),
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        objects(children),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            children,
            st.integers(0, 3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(children, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def shared(checkpoint) -> tuple[Grammars, Tokenizer]:
    grammars = Grammars()
    grammars.open(checkpoint("llama"), 512, (EOS,))
    return grammars, Tokenizer.from_file(str(checkpoint("llama") / "tokenizer.json"))


@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_any_walk_along_the_masks_gives_a_valid_text(shared, schema, seed):
    grammars, tokenizer = shared
    structured = constraint("json", schema)
    request = constrained("r", structured)
    grammars.prepare(request)
    table = SequenceTable.allocate(1, 2000, 16)
    table.requests[0] = request
    matchers = Matchers(grammars, 512, (EOS,))
    random = np.random.default_rng(seed)
    output: list[int] = []
    while EOS not in output:
        masks, errors = matchers.masks(table, np.array([0], dtype=np.int32))
        assert not errors
        allowed = np.flatnonzero(masks[0])
        assert len(allowed)
        # the end as soon as it may come, so that walks are short
        output.append(EOS if EOS in allowed else int(random.choice(allowed)))
        assert len(output) < 1900
        table.token_ids[0, len(output) - 1] = output[-1]
        table.num_tokens[0] = len(output)
        if random.random() < 0.1:
            matchers = Matchers(grammars, 512, (EOS,))  # preempted, or on another worker
    jsonschema.validate(json.loads(tokenizer.decode(output[:-1], skip_special_tokens=False)), schema)
