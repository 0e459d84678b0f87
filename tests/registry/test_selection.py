"""Selections: every documented form is read, and everything else is one line that says what is wrong."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Ge, Lt
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tunery.registry.contracts import KINDS, Strategy
from tunery.registry.errors import ConfigError, InvalidPluginError, SelectionError, TuneryError
from tunery.registry.loading import load_plugins
from tunery.registry.selection import Selection, configure, parse_selection, parse_selections, read_yaml

if TYPE_CHECKING:
    from decimal import Decimal

OWNER = "a-dist 1.0 (a.module)"


class Method(Strategy):
    name = "method"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        r: Annotated[int, Ge(1)] = 8
        rate: Annotated[float, Ge(0), Lt(1)] = 0.5
        init: Literal["default", "gaussian"] = "default"
        target_modules: tuple[str, ...] | None = None
        frozen: bool = True

        def __post_init__(self) -> None:
            if self.r == 13:
                raise ValueError("r must not be 13")

    def prepare(self, model: Any, run: Any) -> Any:
        return model


class Open(Method):
    name = "open"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        peft_type: str
        fields: dict[str, Any] = field(default_factory=dict, metadata={"open": True})


class Unresolved(Method):
    name = "unresolved"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        amount: Decimal | None = None


def options(text: str) -> dict[str, Any]:
    """Return the options of a selection in string form."""
    return dict(parse_selection(text, "strategy").options)


def configured(value: object, cls: type[Strategy] = Method) -> Any:
    """Return the config of ``cls`` that a selection makes."""
    return configure(cls, parse_selection(value, "strategy"), OWNER)


def refusal(value: object, cls: type[Strategy] = Method) -> str:
    """Return what is said of a selection whose options ``cls`` does not take."""
    with pytest.raises(ConfigError) as caught:
        configured(value, cls)
    return str(caught.value)


# ---- forms


@pytest.mark.parametrize(
    "value",
    [
        "mixout:p=0.9,mask=column",
        " mixout : p = 0.9 , mask = column ",
        {"name": "mixout", "p": 0.9, "mask": "column"},
        '{"name": "mixout", "p": 0.9, "mask": "column"}',
        "{name: mixout, p: 0.9, mask: column}",
        Selection("mixout", {"p": 0.9, "mask": "column"}),
    ],
)
def test_forms_of_one_selection(value: object):
    """A string, a mapping, a mapping in JSON or YAML, or a selection: all mean the same."""
    assert parse_selection(value, "regularizer") == Selection("mixout", {"p": 0.9, "mask": "column"})


@pytest.mark.parametrize(
    "value",
    [
        ["mixout:p=0.9", "lnsr"],
        ("mixout:p=0.9", {"name": "lnsr"}),
        [{"name": "mixout", "p": 0.9}, "lnsr"],
        '["mixout:p=0.9", {"name": "lnsr"}]',
        "[{name: mixout, p: 0.9}, lnsr]",
    ],
)
def test_forms_of_a_list(value: object):
    """A list of either form, from Python, JSON or YAML, in its order."""
    assert parse_selections(value, "regularizer") == (Selection("mixout", {"p": 0.9}), Selection("lnsr"))


@pytest.mark.parametrize("value", [None, "", "  ", [], (), "[]"])
def test_nothing_selected(value: object):
    """No plugin is an answer too."""
    assert parse_selections(value, "probe") == ()


@pytest.mark.parametrize("value", ["lora", {"name": "lora"}])
def test_one_selection_where_several_may_stand(value: object):
    """A list of one needs no brackets."""
    assert parse_selections(value, "strategy") == (Selection("lora"),)


def test_a_name_twice_is_refused():
    """Which of the two should count?"""
    with pytest.raises(SelectionError, match="'mixout' is selected twice"):
        parse_selections(["mixout:p=0.1", "mixout:p=0.9"], "regularizer")


# ---- values of the string form


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-8", -8),
        ("+8", 8),
        ("1_000", 1000),
        ("0.9", 0.9),
        (".5", 0.5),
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("true", True),
        ("True", True),
        ("false", False),
        ("null", None),
        ("None", None),
        ("gaussian", "gaussian"),
        ("", ""),
        ("1e5abc", "1e5abc"),
        ("a=b", "a=b"),
        ("don't", "don't"),
        ("http://host:80/x", "http://host:80/x"),
        ('"0.9"', "0.9"),
        ("'0.9'", "0.9"),
        ('"a,b"', "a,b"),
        ("'a,b'", "a,b"),
        (r'"say \"x,y\""', 'say "x,y"'),
        (r'"back\\"', "back\\"),
        ('"[not, a list"', "[not, a list"),
        ("[1, 2]", [1, 2]),
        ("[query, value]", ["query", "value"]),
        ('["query", "value"]', ["query", "value"]),
        ("[1e-5, 2E3, 1e5abc]", [1e-5, 2000.0, "1e5abc"]),
        ("[[1, 2], [3]]", [[1, 2], [3]]),
        ('{a: [1, 2], b: "x,y"}', {"a": [1, 2], "b": "x,y"}),
        ('{"a": {"b": [null]}}', {"a": {"b": [None]}}),
        ('["]", "a"]', ["]", "a"]),
    ],
)
def test_values(text: str, value: object):
    """Each is read as documented, also between two others."""
    assert options(f"x:key={text}") == {"key": value}
    among = options(f"x:before=1,key={text},after=[2]")
    assert among == {"before": 1, "key": value, "after": [2]}
    assert type(among["key"]) is type(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("Mixout", "'Mixout' is not the name of a strategy"),
        (":p=1", "'' is not the name"),
        ("mixout,lnsr", "is not the name"),
        ("mixout:", "cannot read option ''"),
        ("mixout:p", "cannot read option 'p'"),
        ("mixout:p=1,", "cannot read option ''"),
        ("mixout:=1", "cannot read option '=1'"),
        ("mixout:p=1,p=2", "option 'p' is given twice"),
        ("mixout:p=[1,2", "missing ']'"),
        ("mixout:p=1]", "unexpected ']'"),
        ("mixout:p=[1,2}", "unexpected '}'"),
        ('mixout:p="x', "missing '\"'"),
        ("mixout:p=[a: : b]", "cannot read strategy '[a: : b]'"),
        ("{name: mixout", "cannot read strategy '{name: mixout'"),
        ({"nme": "mixout"}, "did you mean 'nme'?"),
        ({"p": 0.9}, "has no 'name'"),
        ({}, "has no 'name'"),
        ({"name": 3}, "3 is not the name"),
        ({"name": "mixout", 3: 4}, "option 3 is not a name"),
        ({"name": "mixout", "a b": 4}, "option 'a b' is not a name"),
        (3, "cannot read strategy 3 of type int"),
        (None, "cannot read strategy None"),
    ],
)
def test_what_cannot_be_read(value: object, said: str):
    """It is quoted, and what can be read is listed."""
    with pytest.raises(SelectionError) as caught:
        parse_selection(value, "strategy")
    assert said in str(caught.value)
    assert not isinstance(caught.value, ConfigError)


def test_anything_with_odd_equality_is_refused_as_it_is():
    """An array compares element by element; that is no reason for a traceback."""

    class Array:
        def __eq__(self, other: object) -> Any:
            raise ValueError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(SelectionError, match="of type Array"):
        parse_selections(Array(), "probe")


@pytest.mark.parametrize("text", ["!!bool x", "!!int ''", "!!timestamp x", "2020-13-45", "a: b: c", "{a: " * 5000])
def test_yaml_that_is_none(text: str):
    """PyYAML's other exceptions do not get through."""
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


# ---- strict configs


def test_defaults_and_options():
    """What is not given keeps its default; lists become what the field holds."""
    assert configured("method") == Method.Config()
    assert configured("method:r=4,rate=0,init=gaussian,target_modules=[q,v],frozen=false") == Method.Config(
        r=4, rate=0, init="gaussian", target_modules=("q", "v"), frozen=False
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('method:r="8"', "option r = '8': Input should be a valid integer"),
        ("method:r=8.5", "option r = 8.5: Input should be a valid integer"),
        ("method:r=8.0", "option r = 8.0: Input should be a valid integer"),
        ("method:r=true", "option r = True: Input should be a valid integer"),
        ("method:r=null", "option r = None: Input should be a valid integer"),
        ("method:rate=true", "option rate = True: Input should be a valid number"),
        ("method:rate=half", "option rate = 'half': Input should be a valid number"),
        ("method:frozen=1", "option frozen = 1: Input should be a valid boolean"),
        ("method:init=uniform", "option init = 'uniform': Input should be 'default' or 'gaussian'"),
        ("method:target_modules=[q,1]", "option target_modules.1 = 1: Input should be a valid string"),
        ("method:r=0", "option r = 0: Input should be greater than or equal to 1"),
        ("method:rate=1", "option rate = 1: Input should be less than 1"),
        ("method:rate=NaN", "option rate = nan: "),
        ("method:rate=1e999", "option rate = inf: "),
        ({"name": "method", "rate": 10**400}, "Input should be a finite number"),
        ({"name": "method", "rate": b"x"}, "option rate = b'x' is not plain data; known: numbers, text"),
        ({"name": "method", "init": "\ud800"}, r"option init = '\ud800' is not plain data"),
        ("method:r=13", "strategy 'method': r must not be 13"),
        ("method:rr=4", "has no option 'rr'; known: r, rate, init, target_modules, frozen"),
    ],
)
def test_wrong_options(value: object, said: str):
    """Plugin, field, what was given, what is allowed, and whose it is."""
    message = refusal(value)
    assert message.startswith("strategy 'method'")
    assert said in message
    assert f"in {OWNER}" in message


@pytest.mark.parametrize("key", ["target_module", "target-modules", "targetmodules"])
def test_did_you_mean_an_option(key: str):
    """A misspelt key finds its neighbour, dashes included."""
    assert refusal(f"method:{key}=[q]").endswith("did you mean 'target_modules'?")


def test_open_field_takes_what_its_author_could_not_list():
    """Other keys go there; the field itself has no name a user could type."""
    assert configured("open:peft_type=VERA,r=64,fields=2", Open) == Open.Config(
        peft_type="VERA", fields={"r": 64, "fields": 2}
    )
    assert "option peft_type: Field required" in refusal("open:r=64", Open)


def test_nesting_too_deep_for_any_option():
    """It is JSON, but nothing anybody means."""
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    assert "nested too deeply" in refusal({"name": "open", "peft_type": "X", "r": deep}, Open)


def test_config_that_cannot_be_validated_is_its_authors_fault():
    """A type imported for type checkers alone does not exist when it is needed."""
    with pytest.raises(
        InvalidPluginError, match=r"'unresolved' has a Config that cannot be validated: .*Decimal"
    ) as caught:
        configured("unresolved", Unresolved)
    assert OWNER in str(caught.value)


# ---- properties

ODD = st.sampled_from(list("\x00\n\u2028\x1b\ud800[]{}(),:=\"'\\#&*!|>%@`~-+.eE_0 "))
TEXT = st.text(st.one_of(ODD, st.characters()), max_size=40)
KEYS = st.from_regex(r"[a-zA-Zäß_][a-z0-9_é]{0,11}(-[a-z]{1,3})?", fullmatch=True)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,11}", fullmatch=True)


@settings(max_examples=500, deadline=None)
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


@settings(max_examples=2000, deadline=None)
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
