"""Selections: every documented form is read, and everything else is one line that says what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
import yaml
from annotated_types import Ge, Lt

from tunery.registry.contracts import Strategy
from tunery.registry.errors import ConfigError, InvalidPluginError, SelectionError
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
