"""The exception class and the form of its messages."""

from __future__ import annotations

import pytest

import fshard as fs
from fshard.errors import fail, raise_all


def test_sharding_error_is_a_value_error():
    assert issubclass(fs.ShardingError, ValueError)
    assert type(fail("no")) is fs.ShardingError


def test_fail_omits_empty_sections():
    assert str(fail("no")) == "no"
    assert str(fail("no", fix="yes")) == "no\n  fix: yes"
    assert str(fail("no", "because")) == "no\n  because"
    assert str(fail("no", shape=[3])) == "no\n  shape  [3]"


def test_fail_orders_facts_notes_and_fix():
    error = fail("no", "first", "second\nthird", fix="yes", shape=[3], spec=fs.P("a"))
    assert str(error) == "no\n  shape  [3]    spec  P('a')\n  first\n  second\n  third\n  fix: yes"


def test_raise_all_without_errors_does_nothing():
    assert raise_all([]) is None


def test_raise_all_raises_a_single_error_itself():
    error = fail("only this", fix="that")
    with pytest.raises(fs.ShardingError) as caught:
        raise_all([error])
    assert caught.value is error


def test_raise_all_shows_every_error_in_full():
    with pytest.raises(fs.ShardingError) as caught:
        raise_all([fail("one", fix="a"), fail("two", n=2)])
    assert str(caught.value) == "2 problems\none\n  fix: a\ntwo\n  n  2"
