"""Properties of selections: the string form reads back equal, and nothing malformed gets past our own errors."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tunery.registry.contracts import KINDS
from tunery.registry.errors import TuneryError
from tunery.registry.loading import load_plugins
from tunery.registry.selection import Selection, configure, parse_selection, parse_selections

ODD = st.sampled_from(list("\x00\n\u2028\x1b\ud800[]{}(),:=\"'\\#&*!|>%@`~-+.eE_0 "))
TEXT = st.text(st.one_of(ODD, st.characters()), max_size=40)
KEYS = st.from_regex(r"[a-zA-Zäß_][a-z0-9_é]{0,11}(-[a-z]{1,3})?", fullmatch=True)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,11}", fullmatch=True)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(Selection, NAMES, st.dictionaries(KEYS, PLAIN, max_size=4)))
@example(Selection("x", {"key": 'a\\"b,c'}))
def test_string_form_reads_back_equal(selection: Selection):
    """What a log or a message shows can be pasted into a recipe."""
    back = parse_selection(str(selection), "strategy")
    assert (back.name, json.dumps(back.options)) == (selection.name, json.dumps(selection.options))


def test_string_form_of_anything():
    """A selection shows itself whatever it holds."""
    assert (
        str(Selection("x", {"a": float, "b": math.nan, "c": {b"": 1}}))
        == """x:a="<class 'float'>",b=NaN,c="{b'': 1}\""""
    )


ENTRIES = list(load_plugins().catalog)
VALID = [
    "lora:r=4,alpha=8,target_modules=[query,value]",
    "l2_sp:alpha=1e-5,beta=0.0",
    '{"name": "peft", "peft_type": "VERA", "r": 64}',
    "[{name: weight_distance}, 'full']",
    'peft:peft_type="LORA",init_lora_weights={"a": [1, "x,y"]}',
]


class Hostile:
    """Answers nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = object.__hash__


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(1, 6000).map(lambda digits: 10**digits),
    st.floats(),
    TEXT,
    st.binary(max_size=8),
    st.dates(),
    st.complex_numbers(),
    st.builds(Hostile),
    st.sampled_from([object(), int, len, range(3), NotImplemented, VALID[0], *(entry.name for entry in ENTRIES)]),
)
OPTION_KEYS = st.sampled_from(
    [name for entry in ENTRIES for name in entry.cls.Config.__dataclass_fields__]
    + ["name", "no_such", "\ud800", "a\nb"]
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(OPTION_KEYS, st.integers(), st.none(), TEXT), inner, max_size=4),
        st.lists(inner, max_size=2).map(iter),
    ),
    max_leaves=10,
)
MAPPINGS = st.builds(
    lambda name, options: {"name": name, **options},
    st.sampled_from([entry.name for entry in ENTRIES]),
    st.dictionaries(OPTION_KEYS.filter(lambda key: key != "name"), OBJECTS, max_size=3),
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid selection with a few pieces cut out, doubled, or replaced by odd characters."""
    text = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 4))):
        start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 5))
        piece = draw(st.one_of(TEXT, st.just(text[start : start + length] * 2)))
        text = text[:start] + piece + text[start + length :]
    return text


def assert_own_errors(value: object) -> None:
    """Assert that whatever is selected becomes, for every plugin, a config or one line."""
    for kind in KINDS:
        try:
            selections = parse_selections(value, kind)
        except TuneryError as error:
            assert_one_line(error)
            continue
        for selection, entry in itertools.product(selections, ENTRIES):
            str(selection)
            try:
                config = configure(entry.cls, Selection(entry.name, selection.options), str(entry.origin))
            except TuneryError as error:
                assert_one_line(error)
            else:
                assert isinstance(config, entry.cls.Config)
                assert all(math.isfinite(number) for number in vars(config).values() if isinstance(number, float))


def assert_one_line(error: TuneryError) -> None:
    """Assert that an error is short enough to read and has no line break of any script."""
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 2000


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(TEXT, mutated(), MAPPINGS, OBJECTS))
def test_malformed_selections_are_our_own_errors(value: object):
    """2,000 texts, valid selections that were damaged, mappings with anything in them, and other objects."""
    assert_own_errors(value)


DEEP_TEXTS = [
    "(" * 50_000,
    "{a: " * 50_000,
    '{"a":' * 50_000,
    "[" * 500 + "]" * 500,
    "lora:r=" + "[{" * 50_000,
    "lora:r=" + "[" * 250 + "]" * 250,
    "lora:r=" + "{a: " * 250 + "}" * 250,
]


@pytest.mark.parametrize("text", DEEP_TEXTS, ids=lambda text: f"{text[:9]}x{len(text)}")
def test_deep_text_is_our_own_error(text: str):
    """Brackets in brackets, far more than the stack of any parser takes."""
    assert_own_errors(text)


@pytest.mark.parametrize("depth", [150, 250, 1200, 50_000])
def test_deep_objects_are_our_own_error(depth: int):
    """The same as lists in lists and mappings in mappings."""
    lists: Any = 1
    mappings: Any = 1
    for _ in range(depth):
        lists, mappings = [lists], {"a": mappings}
    for nested in (lists, mappings):
        assert_own_errors(nested)
        assert_own_errors({"name": "peft", "peft_type": "LORA", "r": nested})
