"""The exception that users see, the form of its message (what, where, the facts, the arithmetic, the fix), and `checked`."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


class ShardingError(ValueError):
    """Error of a program that fshard refuses. The message says what and where, shows the facts and names the fix."""


def fail(what: str, *notes: str, fix: str = "", **facts: object) -> ShardingError:
    """Return one error: `what` on the first line, then the facts on one aligned line, the notes, the fix.

    >>> print(fail("cannot do that", "3 + 3 != 7", fix="use 6", shape="f32[3]", spec="P()"))
    cannot do that
      shape  f32[3]    spec  P()
      3 + 3 != 7
      fix: use 6
    """
    lines = [what]
    if facts:
        lines.append("  " + "    ".join(f"{name}  {value}" for name, value in facts.items()))
    lines += [f"  {line}" for note in notes for line in note.splitlines()]
    if fix:
        lines.append(f"  fix: {fix}")
    return ShardingError("\n".join(lines))


def raise_all(errors: Sequence[ShardingError]) -> None:
    """Raise every collected error as one, so that a user sees all failing leaves at once; nothing if there is none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ShardingError(f"{len(errors)} problems\n" + "\n".join(str(e) for e in errors))


def join_limited(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join the first `limit` items, and say how many more there are.

    >>> join_limited(["a", "b", "c"], 2)
    'a, b, and 1 more'
    """
    rest = len(items) - limit
    return separator.join(items[:limit]) + (f"{separator.rstrip()} and {rest} more" if rest > 0 else "")


_FIXES = {
    "a Mesh": "fs.make_mesh(data=2, model=4)", "a P": "fs.P('data'); fs.P() for a leaf that is not split",
    "a ShardMapped": "pass what fs.shard_map returns", "a Tensor": "torch.as_tensor(x)", "key": "fs.key(0)",
}  # fmt: skip


def must_be(what: str, words: str, x: object, fix: str = "") -> ShardingError:
    """Return the error of an argument or a leaf `x` that is not of the kind that `words` name.

    >>> print(must_be("device_put: mesh", "a Mesh", "data"))
    device_put: mesh must be a Mesh, got 'data'
      fix: fs.make_mesh(data=2, model=4)
    """
    fix = fix or _FIXES.get(what.rpartition(" ")[2]) or _FIXES.get(words.removesuffix(" or None"), "")
    return fail(f"{what} must be {words}, got {shown(x)}", fix=fix)


def shown(x: object) -> str:
    """Return the repr of an object if it is short, and else its type; of a function its name.

    >>> shown("data"), shown(torch.zeros(3, 4)), shown(fail)
    ("'data'", 'a Tensor', 'the function fail')
    """
    if isinstance(x, types.FunctionType):
        return f"the function {x.__name__}"
    text = repr(x)
    return text if len(text) <= 40 and "\n" not in text and " at 0x" not in text else a_type(type(x))


def a_type(kind: type) -> str:
    """Return the name of a type with its article.

    >>> a_type(int), a_type(str)
    ('an int', 'a str')
    """
    name = kind.__name__
    return f"a{'n' * (name[0].lower() in 'aeio')} {name}"


# --- arguments of public functions ----------------------------------------------------------------------------


def checked(f: F) -> F:
    """Check the arguments of each call by the annotations: a decorator of public functions and of dataclasses.

    An annotation states a kind (int, Tensor, a tuple of str, one of some literals), not a range: the function checks
    values itself. `Any` accepts everything. In a compiled program nothing is checked.

    >>> double = checked(lambda_of_int)
    >>> double("a")
    Traceback (most recent call last):
    fshard.errors.ShardingError: lambda_of_int: n='a' is a str
      fix: an int
    """
    if isinstance(f, type):
        f.__init__ = _checked(vars(f)["__init__"], f.__name__)  # type: ignore[misc]
        return f
    return _checked(f, f.__name__)


def _checked(f: F, verb: str) -> F:
    parameters = list(inspect.signature(f).parameters.values())
    # Without that of the result, which may be a class that is defined further down.
    annotations = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    hints = typing.get_type_hints(types.SimpleNamespace(__annotations__=annotations), f.__globals__)
    kinds = {name: _kind(hint) for name, hint in hints.items()}
    by_position = [kinds.get(p.name) for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in parameters[: len(by_position)]]
    rest = {p.kind: p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    more, others = rest.get(inspect.Parameter.VAR_POSITIONAL), rest.get(inspect.Parameter.VAR_KEYWORD)
    other_kind = kinds.get(others) if others else None

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return f(*args, **kwargs)
        for x, kind, name in zip(args, by_position, names, strict=False):
            if kind is not None and not kind.accepts(x):
                raise must_be(f"{verb}: {name.rstrip('_')}", kind.words, x)
        if len(args) > len(by_position):
            if more is None:
                raise _too_many(verb, parameters, len(args), len(by_position))
            for x in args[len(by_position) :]:
                if not kinds[more].accepts(x):
                    raise must_be(f"{verb}: {more}", kinds[more].words, x)
        for name, x in kwargs.items():
            kind = kinds.get(name, other_kind)
            if kind is not None and not kind.accepts(x):
                raise must_be(f"{verb}: {name.rstrip('_')}", kind.words, x)
        return f(*args, **kwargs)

    return typing.cast(F, wrapper)


class _Kind(NamedTuple):
    """Values that an annotation allows, as a test and in words."""

    accepts: Callable[[Any], bool]
    words: str


_NUMBERS: dict[Any, tuple[type, ...]] = {
    int: (numbers.Integral, torch.SymInt),
    float: (numbers.Real, torch.SymInt, torch.SymFloat),
}


def _kind(hint: Any) -> _Kind:
    """Return the kind of an annotation. Containers are tested with their elements."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (Any, object):
        return _Kind(lambda x: True, "anything")
    if origin is typing.Literal:
        return _Kind(lambda x: isinstance(x, str) and x in parts, _join_or([repr(part) for part in parts]))
    if origin is collections.abc.Callable:
        return _Kind(callable, "a function")
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(part) for part in parts]
        return _Kind(lambda x: any(k.accepts(x) for k in kinds), _join_or([k.words for k in kinds]))
    if parts and issubclass(origin, Mapping):
        key, value = map(_kind, parts)
        items = lambda x: isinstance(x, origin) and all(key.accepts(k) and value.accepts(v) for k, v in x.items())  # noqa: E731
        return _Kind(items, f"{a_type(origin)} of {_plural(value)}")
    if parts and issubclass(origin, Sequence):
        each = _kind(parts[0])
        length = None if parts[-1] is ... or origin is not tuple else len(parts)
        elements = lambda x: (isinstance(x, origin) and not isinstance(x, (str, bytes)) and all(map(each.accepts, x))
                              and length in (None, len(x)))  # noqa: E731  # fmt: skip
        return _Kind(elements, f"{a_type(origin)} of {length or ''}{' ' * bool(length)}{_plural(each)}")
    words = {types.NoneType: "None", types.EllipsisType: "'...'"}.get(origin) or a_type(origin)
    return _Kind(lambda x: isinstance(x, _NUMBERS.get(origin, origin)), words)


def _plural(kind: _Kind) -> str:
    """Return the words of the elements of a container: `str` for "a str"."""
    return kind.words.removeprefix("an ").removeprefix("a ")


def _join_or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _too_many(verb: str, parameters: Sequence[inspect.Parameter], got: int, most: int) -> ShardingError:
    """Return the error of a call like `show(tree, specs, mesh)`, where only the first argument has a position."""
    by_name = [f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY]
    by_name += [f"**{p.name}" for p in parameters if p.kind is p.VAR_KEYWORD]
    names = [*(p.name.rstrip("_") for p in parameters[:most]), *by_name]
    return fail(f"{verb}: {got} arguments by position, of which it takes {most}", fix=f"{verb}({', '.join(names)})")
