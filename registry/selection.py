"""From what a user writes to a validated plugin config: ``"mixout:p=0.9"``, ``{"name": "mixout", "p": 0.9}``, or a list.

The grammar of the string form is ``NAME[:KEY=VALUE[,KEY=VALUE]...]``. A value is read as JSON where it is JSON
(``0.9``, ``1e-5``, ``true``, ``null``, ``"text"``, ``{"a": 1}``), as a YAML flow list or mapping where it begins with a
bracket (``[query, value]``), else as plain text; commas inside brackets or quotes belong to the value.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, InvalidPluginError, SelectionError, did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

    from .contracts import Plugin

FORMS = ("'name'", "'name:key=value,key=value'", "{'name': ..., key: value}", "a list of these")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_CLOSING = {"[": "]", "{": "}", "(": ")"}
# A quoted text, a word (it may hold a quote: don't), or one character.
_TOKEN = re.compile(r"""\"(?:[^"\\]|\\.)*\"|'[^']*'|[^\s,=:\[\]{}()"'][^\s,=:\[\]{}()]*|.""", re.DOTALL)


@dataclass(frozen=True)
class Selection:
    """One plugin asked for by name, its options not yet checked against the plugin."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the string form, which :func:`parse_selection` reads back to an equal selection if options are plain data."""
        options = ",".join(f"{key}={_written(value)}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


def parse_selections(value: object, kind: str) -> tuple[Selection, ...]:
    """Read zero or more selections of one ``kind``: ``None``, one selection, or a list of them.

    Raises:
        SelectionError: a selection that cannot be read, or one name twice.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _flow(value, kind)
    items = list(value) if isinstance(value, list | tuple) else [value]
    selections = tuple(parse_selection(item, kind) for item in items)
    names = [selection.name for selection in selections]
    for name in names:
        if names.count(name) > 1:
            raise SelectionError(f"{kind} {name!r} is selected twice", remedy="name each plugin once")
    return selections


def parse_selection(value: object, kind: str) -> Selection:
    """Read one selection of one ``kind`` from its string or mapping form.

    Raises:
        SelectionError: a selection that cannot be read.
    """
    if isinstance(value, Selection):
        return value
    if isinstance(value, str):
        text = value.strip()
        return _from_mapping(_flow(text, kind), kind) if text.startswith("{") else _from_string(text, kind)
    if isinstance(value, Mapping):
        return _from_mapping(value, kind)
    raise SelectionError(f"cannot read {kind} {_shown(value)} of type {type(value).__name__}", known=FORMS)


def configure(cls: type[Plugin], selection: Selection, owner: str) -> Any:
    """Return ``cls.Config`` made from the selection's options, validated strictly: no text for numbers, no 8.5 for 8.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; names plugin, field, value and what is allowed.
        InvalidPluginError: a Config whose annotations cannot be resolved or validated.
    """
    asked = f"{cls.kind} {cls.name!r}"
    fields = {item.name: item for item in dataclasses.fields(cls.Config)}
    # A config field of its own may hold what its author cannot list ahead: the fields of any PEFT config, say.
    open_field = next((name for name, item in fields.items() if item.metadata.get("open")), None)
    options: dict[str, Any] = {}
    for key, value in selection.options.items():
        if key in fields and key != open_field:
            options[key] = value
        elif open_field is not None:
            options.setdefault(open_field, {})[key] = value
        else:
            known = [name for name in fields if name != open_field]
            raise ConfigError(
                f"{asked} has no option {_shown(key)}",
                known=known or ["no options"],
                owner=owner,
                remedy=did_you_mean(key, known),
            )
    for key, value in options.items():
        if _as_json(value) is None:
            raise ConfigError(
                f"{asked}: option {key} = {_shown(value)} is not plain data",
                known=("numbers", "text", "true/false", "null", "lists and mappings of these"),
                owner=owner,
            )
    from pydantic import ValidationError
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    try:
        return _adapter(cls.Config).validate_json(_as_json(options) or b"", strict=True)
    except ValidationError as error:
        raise ConfigError(f"{asked}: {_explained(error)}", owner=owner) from None
    except (ValueError, TypeError) as error:  # the Config's own __post_init__
        raise ConfigError(f"{asked}: {error}", owner=owner) from None
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise InvalidPluginError(
            f"{asked} has a Config that cannot be validated: {error.message}", owner=owner
        ) from None


@cache
def _adapter(config: type) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    # A dataclass alone takes no settings of ours; inside a union it inherits them.
    union: Any = config | None
    adapter: TypeAdapter[Any] = TypeAdapter(union, config=ConfigDict(allow_inf_nan=False))
    adapter.rebuild(raise_errors=True)  # an annotation that cannot be resolved is named
    return adapter


def _as_json(value: object) -> bytes | None:
    """Return ``value`` as JSON, ``None`` if it is not plain data: an object, a cycle, half of a surrogate pair."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None


def _explained(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":  # it is JSON, made by us
        return "options are nested too deeply"
    if not first["loc"]:  # the Config's own __post_init__
        return message
    where = ".".join(str(part) for part in first["loc"])
    given = "" if first["type"] == "missing" else f" = {_shown(first['input'])}"
    return f"option {where}{given}: {message}"


def _from_mapping(value: object, kind: str) -> Selection:
    if not isinstance(value, Mapping):
        raise SelectionError(f"cannot read {kind} {_shown(value)}", known=FORMS)
    options = {key: item for key, item in value.items() if key != "name"}
    if "name" not in value:
        keys = [key for key in options if isinstance(key, str)]
        raise SelectionError(f"{kind} {_shown(value)} has no 'name'", known=FORMS, remedy=did_you_mean("name", keys))
    for key in options:
        if not _is_key(key):
            raise SelectionError(f"{kind} {_shown(value)}: option {_shown(key)} is not a name", known=FORMS)
    return Selection(_checked_name(value["name"], kind), options)


def _from_string(text: str, kind: str) -> Selection:
    name, colon, tail = text.partition(":")
    checked = _checked_name(name.strip(), kind)
    options: dict[str, Any] = {}
    for item in _split(tail, kind) if colon else ():
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not _is_key(key):
            raise SelectionError(f"{kind} {_shown(text)}: cannot read option {_shown(item)}", known=("key=value",))
        if key in options:
            raise SelectionError(f"{kind} {_shown(text)}: option {key!r} is given twice")
        options[key] = _scalar(value.strip(), kind)
    return Selection(checked, options)


def _checked_name(name: object, kind: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SelectionError(f"{_shown(name)} is not the name of a {kind}", known=FORMS)
    return name


def _is_key(key: object) -> bool:
    """Whether it can name an option; dashes pass, so that did-you-mean gets to see ``target-modules``."""
    return isinstance(key, str) and key.replace("-", "_").isidentifier()


def _split(text: str, kind: str) -> Iterator[str]:
    """Split at the commas outside brackets and quotes."""
    expected: list[str] = []
    start = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _CLOSING:
            expected.append(_CLOSING[token])
        elif expected and token == expected[-1]:
            expected.pop()
        elif token in _CLOSING.values():
            raise SelectionError(f"{kind} options {_shown(text)}: unexpected {token!r}", known=FORMS)
        elif token in ('"', "'"):
            expected.append(token)
            break
        elif token == "," and not expected:
            yield text[start : match.start()]
            start = match.end()
    if expected:
        raise SelectionError(f"{kind} options {_shown(text)}: missing {expected[-1]!r}", known=FORMS)
    yield text[start:]


def _scalar(text: str, kind: str) -> Any:
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    if text.startswith(("[", "{", '"', "'")):
        return _flow(text, kind)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    for read in (int, float):  # +5, .5, 1_000 and the like, which JSON does not read
        try:
            number = read(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text


def _flow(text: str, kind: str) -> Any:
    """Read a list or mapping, as JSON or as YAML flow style."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    import yaml

    try:
        return read_yaml(text)
    except yaml.YAMLError:
        raise SelectionError(f"cannot read {kind} {_shown(text)}", known=FORMS) from None


def read_yaml(text: str) -> Any:
    """Read YAML safely; unlike PyYAML alone, ``1e-5`` is a number, as in YAML 1.2 and JSON.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())  # a subclass of SafeLoader
    except yaml.YAMLError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML's constructors let these through: "!!bool x", "!!int ''", 2020-13-45, brackets without end.
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None


@cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def _written(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_shown(value))


def _shown(value: object, limit: int = 60) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a stranger's __repr__ must not hide what went wrong
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
