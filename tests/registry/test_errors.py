"""Errors say on one line what was asked, what is known, whose it is and what to do, also in another process."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from tunery.registry import errors
from tunery.registry.errors import ConfigError, TuneryError, did_you_mean

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TuneryError)]
FULL = {"asked": "no probe 'x'", "known": ("y", "z"), "owner": "a-dist 1.0 (a.module)", "remedy": "did you mean 'y'?"}


def test_message_has_four_parts_in_order():
    """Asked, known, owner, remedy."""
    message = str(ConfigError(**FULL))
    assert message == "no probe 'x'; known: y, z; in a-dist 1.0 (a.module); did you mean 'y'?"


@pytest.mark.parametrize("part", ["known", "owner", "remedy"])
def test_a_part_that_is_not_given_leaves_nothing_behind(part: str):
    """No empty brackets, no doubled separators."""
    message = str(TuneryError(**{key: value for key, value in FULL.items() if key != part}))
    assert message.count("; ") == 2
    assert "; ;" not in message and not message.endswith(";")


@pytest.mark.parametrize("breaking", ["\n", "\r\n", "\u2028", "\x85", "\x1c", "\v", " \t "])
def test_message_is_one_line(breaking: str):
    """Whatever a name or another library's message contains."""
    message = str(TuneryError(f"one{breaking}two", owner=f"three{breaking}four", remedy=f"five{breaking}"))
    assert message == "one two; in three four; five"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_survives_pickling(cls: type[TuneryError], again):
    """A worker process hands it on as it is."""
    error = cls(**FULL)
    back = again(error)
    assert type(back) is cls
    assert str(back) == str(error)
    assert {key: getattr(back, key) for key in FULL} == FULL


def test_the_tree_in_the_docstring_is_the_tree_of_classes():
    """The drawing at the top of the module is true."""
    drawn: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([ │├└─]*)(\w+Error) {2,}\S", line)
        if match:
            depth = len(match[1])
            path = [(other, name) for other, name in path if other < depth]
            drawn[match[2]] = path[-1][1] if path else "Exception"
            path.append((depth, match[2]))
    assert drawn == {cls.__name__: cls.__base__.__name__ for cls in CLASSES}


def test_did_you_mean():
    """Near names are proposed, far ones are not."""
    assert did_you_mean("mixuot", ["mixout", "lnsr"]) == "did you mean 'mixout'?"
    assert did_you_mean("banana", ["mixout", "lnsr"]) == ""
