"""The exception that users see, and the form of its message: what, where, the facts, the arithmetic, the fix.

`checked` raises it for arguments of public functions that are of a wrong kind. Its traceback has the user's frames; the
environment variable FSHARD_TRACEBACK=full keeps all of them, for those who debug fshard.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import itertools
import numbers
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ._core import callsite

F = TypeVar("F", bound=Callable[..., Any])


class ShardingError(ValueError):
    """Error of a program that fshard refuses. The message states what and where, shows the facts and names the fix.

    Its traceback has only the frames of the user's code, in Python, pytest and IPython, which shows the message first.
    With the environment variable FSHARD_TRACEBACK=full it has all frames, also of fshard and torch.

    >>> device_put(torch.ones(2, 2), P("modle"), mesh)
    Traceback (most recent call last):
        ...
    ShardingError: device_put: tree: the mesh has no axis 'modle'
      shape  [2, 2]    spec  P('modle')    mesh  data=2, model=4
      fix: use one of ['data', 'model']
    """

    def __str__(self) -> str:
        return printable(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the message, then the lines of the user's code, from the outermost."""
        if _shows_all_frames():
            return "".join(traceback.format_exception(self)).splitlines()
        text = "\n".join([f"\x1b[1;31m{type(self).__name__}\x1b[0m: {self}", *getattr(self, "__notes__", [])])
        if self.__cause__ is not None:
            text += f"\n\ncaused by {''.join(traceback.format_exception_only(self.__cause__)).rstrip()}"
        calls = []
        for tb in users_frames(self.__traceback__):
            site = callsite.Site(tb.tb_frame.f_code, tb.tb_lasti)
            calls += [f"  {site}", *(f"    {line}" for line in callsite.quote(site).splitlines())]
        return [*text.split("\n"), *(["", "called from", *calls] if calls else [])]


def hide_library_frames(e: BaseException) -> None:
    """Leave the frames of the user's code in the traceback of an error, and of its cause; raise it by a bare `raise`.

    An error of another kind than ShardingError keeps, below the user's innermost frame, the frames of other libraries,
    and of fshard if one of them raised it; and all frames if none is of the user.
    """
    at: BaseException | None = e
    seen: set[int] = set()  # an error may be among its causes
    while at is not None and id(at) not in seen and not _shows_all_frames():
        seen.add(id(at))
        frames = users_frames(at.__traceback__)
        if not isinstance(e, ShardingError):
            frames = [*frames, *_frames_below(frames[-1])] if frames else _frames(at.__traceback__)
        kept: types.TracebackType | None = None
        for tb in reversed(frames):
            kept = types.TracebackType(kept, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
        at.__traceback__ = kept
        at = at.__cause__


def api_boundary(f: F) -> F:
    """Leave the frames of the user's code in the tracebacks of a function's errors: a decorator, as `checked` is."""
    if torch.compiler.is_dynamo_compiling():  # which can set the name of one function around another, but not of two
        return f

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return f(*args, **kwargs)
        try:
            return f(*args, **kwargs)
        except Exception as e:
            hide_library_frames(e)
            raise

    return typing.cast(F, wrapper)


def _frames(tb: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while tb is not None:
        found.append(tb)
        tb = tb.tb_next
    return found


def _frames_below(tb: types.TracebackType) -> list[types.TracebackType]:
    """Return the frames below one of the user: only of other libraries, or all if fshard raised the error."""
    below = _frames(tb.tb_next)
    is_ours = [tb.tb_frame.f_code.co_filename.startswith(callsite.HERE) for tb in below]
    return below if is_ours[-1:] == [True] else [tb for tb, ours in zip(below, is_ours, strict=True) if not ours]


def users_frames(tb: types.TracebackType | None) -> list[types.TracebackType]:
    """Return the entries of a traceback that are of the user's code."""
    return [tb for tb in _frames(tb) if callsite.is_users_frame(tb.tb_frame)]


def _shows_all_frames() -> bool:
    return os.environ.get("FSHARD_TRACEBACK") == "full"


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape the characters that control a terminal, or that it cannot show: names in a file may have them.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    return _CONTROL.sub(lambda c: ascii(c[0])[1:-1], text)


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
    """Raise every collected error as one, so that a user sees all failing leaves at once; nothing if there is none.

    Errors of one cause, which differ only in the leaf and in an index, are shown once.
    """
    if len(errors) == 1:
        raise errors[0]
    groups: dict[str, list[str]] = {}
    for e in errors:
        cause = _PATH.sub(r"\1*", str(e))
        groups.setdefault(_INDEX.sub("*", _LEAF.sub("", _NO_AXIS.sub(r"\1", cause))), []).append(str(e))
    texts = [_shown_once(group) for group in groups.values()]
    if texts:
        raise ShardingError(texts[0] if len(texts) == 1 else f"{len(texts)} problems\n" + "\n".join(texts))


_PATH = re.compile(r"""\A([^\n]*?\w)(?:\[(?:\d+|'[^'\n]*'|"[^"\n]*")\])+""")  # of a leaf: `args[0]['wte']`
_LEAF = re.compile(r"(?m)^  leaf  .*?(?=    |$)")  # the fact that describes the leaf
_NO_AXIS = re.compile(r"(: the mesh has no axis '\w+'\n)  shape .*")  # one cause for leaves of all shapes and specs
_INDEX = re.compile(r"(?<=[.\[])\d+(?=[.\]])")  # of a block: `['blocks'][3]['up']`, `h.3.attn.weight`


def _shown_once(errors: Sequence[str]) -> str:
    """Return the first of errors that differ in an index, and the words of the others' first lines that differ."""
    first, *others = [e.partition("\n")[0].split() for e in errors]
    names = [" ".join(a for a, b in zip(words, first, strict=False) if a != b).rstrip(":,") for words in others]
    return errors[0] if not others else f"{errors[0]}\n  the same for {join_limited(names, 3)}"


def join_limited(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """Join the first `limit` items, and count the others.

    >>> join_limited(["a", "b", "c"], 2)
    'a, b, and 1 more'
    """
    rest = len(items) - limit
    return separator.join(items[:limit]) + (f"{separator.rstrip()} and {rest} more" if rest > 0 else "")


_FIXES: dict[Any, str] = {  # by the kind and the type that was passed, by the name of the argument, by the kind
    ("a Tensor", "Sharded"): "compute inside fs.shard_map, where it is a tensor; fs.device_get(x) is the full tensor",
    ("a Tensor", "Deferred"): "fs.materialize it, and compute inside fs.shard_map",
    "key": "fs.key(0)",
    "base": "fs.checkpoint.digest(tree)",
    "shape": "(64, 256), a tuple of sizes",
    "a Tensor": "torch.as_tensor(x)",
    "a dtype": "torch.bfloat16",
    "a Mesh": "fs.make_mesh(data=2, model=4)",
    "a P": "fs.P('data'); fs.P() for a leaf that is not split",
    "a Device": "fs.devices.H100, fs.devices.this_cpu(), or fs.devices.Device(...)",
    "a ShardMapped": "pass what fs.shard_map returns",
    "a Plan": "fs.plan(step, *args)",
    "a Plan or a Trace": "fs.plan(step, *args), or fs.trace(step, *args)",
    **{
        ("a float or a function", kind): "opt = fs.optim.adamw(1e-3); state = opt.init(params); params, state = "
        "opt.update(grads, state, params)"
        for kind in ("dict", "list", "generator", "dict_values")
    },
    **{(kind, "PlanTable"): "table[0].plan, the plan of its first row" for kind in ("a Plan", "a Plan or a Trace")},
    **{(kind, "PlanRow"): "row.plan" for kind in ("a Plan", "a Plan or a Trace")},
}


def must_be(what: str, words: str, x: object, fix: str = "") -> ShardingError:
    """Return the error of an argument or a leaf `x` that is not of the kind that `words` name.

    >>> print(must_be("device_put: mesh", "a Mesh", "data"))
    device_put: mesh must be a Mesh, got 'data'
      fix: fs.make_mesh(data=2, model=4)
    """
    kind = words.removesuffix(" or None")
    keys = [(kind, type(x).__name__), what.rpartition(" ")[2], kind]
    fix = fix or next(filter(None, map(_FIXES.get, keys)), "") or call_of(x)
    return fail(f"{what} must be {words}, got {shown(x)}", fix=fix)


def no_attribute(what: str, name: str, obj: object, elsewhere: Mapping[str, str]) -> AttributeError:
    """Return the error of an attribute that objects of another library have, with the expression here in `elsewhere`.

    >>> print(no_attribute("an Optimizer", "step", None, {"step": "opt.update"}))
    an Optimizer has no attribute 'step': it is opt.update
    """
    why = f": it is {elsewhere[name]}" if name in elsewhere else ""
    return AttributeError(f"{what} has no attribute {name!r}{why}", name=name, obj=obj)


def other_names(module: str, elsewhere: Mapping[str, str], *libraries: types.ModuleType) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, whose error explains a name of another library: what it is here.

    That is a name of the module in another case (`fs.optim.AdamW`), or the name in one of `libraries`.
    """

    def getter(name: str) -> Any:
        here = sys.modules[module]
        path = "fs" + module.removeprefix("fshard")
        same = {n.lower(): f"{path}.{n}" for n in here.__all__}.get(name.lower().rstrip("_"))
        other = next((f"{lib.__name__}.{name}" for lib in libraries if hasattr(lib, name)), None)
        found = elsewhere.get(name) or same or other
        raise no_attribute(path, name, here, {name: found} if found else {})

    return getter


def call_of(x: object) -> str:
    """Return the call of a function that is in the place of its result, or "" if it cannot be called so.

    >>> def init(): ...
    >>> call_of(init), call_of(fail), call_of(3)
    ('init()', '', '')
    """
    if not isinstance(x, types.FunctionType):
        return ""
    required = [p for p in inspect.signature(x).parameters.values()
                if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    return "" if required else f"{x.__name__}()"


def number_of(n: int, word: str) -> str:
    """Return a number with its word: `1 argument`, `2 arguments`."""
    return f"{n} {word}{'s' * (n != 1)}"


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
    """Check the arguments of each call by their annotations: a decorator of public functions, methods and classes.

    An annotation states a kind (int, Tensor, a tuple of str, one of some literals) and no range: values are checked by
    the function itself. `Any` accepts everything. A compiled program checks nothing. Cost: a few microseconds a call.

    >>> try:
    ...     psum(torch.ones(3), P("data"))
    ... except fs.ShardingError as e:
    ...     print(e)
    psum: axis must be a str, a tuple of str or None, got P('data')
    """
    if isinstance(f, type):
        # An inherited field of a dataclass has the annotation, a text, that it has in the module of its class.
        names = {name: x for base in reversed(f.__mro__) for name, x in vars(sys.modules[base.__module__]).items()}
        f.__init__ = _checked(vars(f)["__init__"], f.__name__, names)  # type: ignore[misc]
        return f
    return _checked(f, f.__name__, f.__globals__)


class _Annotation(str):
    """An annotation that `help` shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def unquoted(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature whose annotations, which are texts, `help` and `?` show without quotes."""

    def plain(x: Any) -> Any:
        return _Annotation(x) if isinstance(x, str) else x

    parameters = [p.replace(annotation=plain(p.annotation)) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=plain(signature.return_annotation))


def _checked(f: F, verb: str, names: dict[str, Any]) -> F:
    signature = inspect.signature(f)
    parameters = list(signature.parameters.values())
    # Without the annotation of the result, which may name a class that is defined further down.
    annotations = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    hints = typing.get_type_hints(types.SimpleNamespace(__annotations__=annotations), names)
    kinds = {name: kind for name, hint in hints.items() if (kind := _kind(hint)).types != (object,)}
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    others = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
    required = {p.name for p in parameters if p.default is p.empty and p.name not in (rest, others)}
    known = {p.name for p in parameters}
    takes_tensors = any(_fits(_NO_TENSOR, kind) for kind in kinds.values())
    accepted: set[tuple[Any, ...]] = set()  # types of arguments, and names, of calls that `check` need not see again

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Raise for a wrong argument; return whether every call with arguments of these types is right."""
        if len(args) > len(by_position) and not rest:
            raise _too_many(verb, parameters, args, kwargs, len(by_position))
        given = {*by_position[: len(args)], *kwargs}
        all_known = others or given <= known
        if not (required <= given and all_known and len(given) >= min(len(args), len(by_position)) + len(kwargs)):
            raise _wrong_names(verb, parameters, dict(zip(by_position, args, strict=False)), kwargs)
        by_type = True
        for name, x in (*zip(itertools.chain(by_position, itertools.repeat(rest)), args), *kwargs.items()):  # noqa: B905
            kind = kinds.get(name if name in known else others)
            if kind is not None and not isinstance(x, kind.types):
                if not _fits(x, kind):
                    swapped = kind.words == "a Mesh" and any(_fits(y, kind) for y in args)
                    fix = _form_of_call(verb, parameters) if swapped else ""
                    what = f"{verb}: {name.rstrip('_')}"
                    raise _same_name_error(verb, name, kind, x) or must_be(what, kind.words, x, fix)
                by_type &= type(x) is int  # which is in no `types`, since a bool is an int
        return by_type

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return f(*args, **kwargs)
        try:
            kinds_of_call = (*map(type, args), *kwargs, *map(type, kwargs.values()))
            if kinds_of_call not in accepted and check(args, kwargs) and len(accepted) < _MOST_ACCEPTED:
                accepted.add(kinds_of_call)
            return f(*args, **kwargs)
        except Exception as e:
            hide_library_frames(e)
            of_tensors = takes_tensors and isinstance(e, _OF_TENSORS) and not isinstance(e, ShardingError)
            if of_tensors and not hasattr(e, "__notes__"):
                e.add_note(_call_note(verb, {**dict(zip(by_position, args, strict=False)), **kwargs}))
            raise

    wrapper.__signature__ = unquoted(signature)  # type: ignore[attr-defined]
    return typing.cast(F, wrapper)


_MOST_ACCEPTED = 64  # combinations of types, of each function
_NO_TENSOR = torch.empty(0)
_OF_TENSORS = (RuntimeError, IndexError, ValueError, NotImplementedError)  # errors of torch about the tensors of a call


def _call_note(verb: str, args: Mapping[str, Any]) -> str:
    """Return the line that is added to an error of torch about the tensors of a call: its function and its arguments.

    >>> print(_call_note("linear", {"x": torch.ones(2, 3), "w": torch.ones(4, 4), "b": None}))
    in linear(x=float32[2, 3], w=float32[4, 4], b=None)
    """
    texts = {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else shown(x)
             for name, x in args.items()}  # fmt: skip
    return f"in {verb}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def _same_name_error(verb: str, name: str, kind: _Kind, x: object) -> ShardingError | None:
    """Return the error of an argument of another class with the same name, as every model has a `Config`."""
    homes = [_home(t) for t in kind.types if t.__name__ == type(x).__name__]
    if not homes:
        return None
    ours = _home(type(x))
    fix = f"call {ours}.{verb}" if hasattr(sys.modules[ours], verb) else ""
    return fail(f"{verb}: {name} must be {kind.words} of {homes[0]}, got one of {ours}", fix=fix)


def _home(kind: type) -> str:
    """Return the name of the module of a class, or of its package if that has the class too."""
    package = kind.__module__.rpartition(".")[0]
    return package if getattr(sys.modules.get(package), kind.__name__, None) is kind else kind.__module__


def _too_many(
    verb: str, parameters: Sequence[inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any], most: int
) -> ShardingError:
    """Return the error of a call like `show(tree, specs, mesh)`, where only the first argument has a position."""
    got = len(args)
    if parameters[0].name == "self":  # of a method, which is called without it
        got, most = got - 1, most - 1
    by_name = [] if most else _by_name([*args, *kwargs.values()])
    by_name = by_name or ["data=2", "model=4"] * (parameters[-1].name == "axes")
    fix = f"{verb}({', '.join(by_name)})" if by_name else _form_of_call(verb, parameters)
    return fail(f"{verb}: {number_of(got, 'argument')} by position, and it takes {most}", fix=fix)


def _by_name(args: Sequence[Any]) -> list[str]:
    """Return the arguments by name, of a call with a dict of them, or with a list of values and one of names.

    >>> _by_name([(2, 4), ("data", "model")]), _by_name([{"data": 2}])
    (['data=2', 'model=4'], ['data=2'])
    """
    rows = [x for x in args if isinstance(x, (list, tuple)) and x]
    names = next((x for x in rows if all(isinstance(name, str) for name in x)), ())
    values = next((x for x in rows if x is not names and len(x) == len(names)), ())
    table = next((x for x in args if isinstance(x, Mapping)), dict(zip(names, values, strict=False)))
    return [f"{name}={value!r}" for name, value in table.items()]


# Arguments of torch, JAX, Optax and PEFT: the names here, where a function has them.
_NAMES_ELSEWHERE = {
    "betas": "b1, b2", "beta1": "b1", "beta2": "b2", "learning_rate": "lr", "wd": "weight_decay", "T_max": "steps",
    "transition_steps": "steps", "decay_steps": "steps", "check_vma": "check", "check_rep": "check",
    "axis_name": "axis", "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "seed": "key", "rng": "key",
    "generator": "key",
}  # fmt: skip


def _wrong_names(
    verb: str, parameters: Sequence[inspect.Parameter], by_position: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> ShardingError:
    """Return the error of a call without a required argument, or with the name of none that the function has."""
    names = [p.name.rstrip("_") for p in parameters]
    missing = [p.name.rstrip("_") for p in parameters if p.default is p.empty and p.name not in (*by_position, *kwargs)
               and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
    unknown = next((name for name in kwargs if name not in names), None)
    facts = {}
    if unknown is not None:
        what = f"no argument is called {unknown!r}"
        near = _NAMES_ELSEWHERE.get(unknown, "")
        if not near or not set(near.split(", ")) <= set(names):
            near = ", ".join(difflib.get_close_matches(unknown, names, 1))
        facts = {"near": near} if near else {}
    elif missing:
        what = f"{_join(missing, 'and')} {'is' if len(missing) == 1 else 'are'} missing"
    else:
        twice = next(name for name in by_position if name in kwargs)
        what = f"{twice} is passed by position, as {shown(by_position[twice])}, and by name"
    return fail(f"{verb}: {what}", fix=_form_of_call(verb, parameters, missing), **facts)


def _form_of_call(verb: str, parameters: Sequence[inspect.Parameter], missing: Sequence[str] = ()) -> str:
    """Return the form of a call: its arguments by position, then by name; or those that it needs, with examples."""
    forms: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*{}", inspect.Parameter.VAR_KEYWORD: "**{}",
             inspect.Parameter.KEYWORD_ONLY: "{}={}"}  # fmt: skip
    texts = []
    for p in parameters:
        name, form = p.name.rstrip("_"), forms.get(p.kind, "{}")
        if name in missing:
            texts.append('"data"' if name == "axis" else form.format(name, _FIXES.get(name, "...")))
        elif name != "self" and not (missing and form != "{}"):
            texts.append(form.format(name, ""))
    return f"{verb}({', '.join(texts)})"


class _Kind(NamedTuple):
    """Values that an annotation accepts: by their types, or by a test; and the kind in words."""

    words: str
    types: tuple[type, ...] = ()
    accepts: Callable[[Any], bool] | None = None


def _kind(hint: Any) -> _Kind:
    """Return the kind of an annotation. Containers are tested with their elements."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hasattr(origin, "__value__"):  # the name of a `type` statement, as NDArray is since numpy 2.5
        return _kind(origin.__value__[parts] if parts else origin.__value__)
    if origin in (Any, object) or isinstance(origin, typing.TypeVar):
        return _Kind("anything", (object,))
    if origin is typing.Literal:
        return _Kind(_join([repr(part) for part in parts]), (), lambda x: isinstance(x, str) and x in parts)
    if origin is collections.abc.Callable:
        return _Kind("a function", (types.FunctionType,), callable)
    if origin is int:
        return _Kind("an int", (torch.SymInt,), lambda x: type(x) is int or
                     (isinstance(x, numbers.Integral) and not isinstance(x, bool)))  # fmt: skip
    if getattr(origin, "_is_protocol", False):  # isinstance takes 60 microseconds
        methods = [name for name in vars(origin) if not name.startswith("_")]
        return _Kind(a_type(origin), (), lambda x: all(hasattr(x, name) for name in methods))
    if origin is float:
        return _Kind("a float", (float, int, torch.SymInt, torch.SymFloat), lambda x: isinstance(x, numbers.Real))
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(part) for part in parts]
        return _Kind(_join([k.words for k in kinds]), tuple(t for k in kinds for t in k.types),
                     lambda x: any(_fits(x, k) for k in kinds))  # fmt: skip
    if parts and issubclass(origin, Mapping):
        key, value = map(_kind, parts)

        def accepts(x: Any) -> bool:
            return isinstance(x, origin) and all(_fits(k, key) and _fits(v, value) for k, v in x.items())

        return _Kind(f"{a_type(origin)} of {_without_article(value.words)}", (), accepts)
    if parts and issubclass(origin, Sequence):
        each = _kind(parts[0])
        length = len(parts) if origin is tuple and parts[-1] is not ... else None
        if origin is tuple and each.types == (object,) and length is None:
            return _Kind("a tuple of anything", (tuple,))
        usual = {*each.types, *([int] if _fits(0, each) else [])}  # every value of exactly these types fits

        def accepts(x: Any) -> bool:
            is_sequence = isinstance(x, origin) and not isinstance(x, (str, bytes)) and length in (None, len(x))
            elements = x[:1] if isinstance(x, range) else x  # of 10^12 numbers too
            return is_sequence and (usual.issuperset(map(type, elements)) or all(_fits(y, each) for y in elements))

        return _Kind(f"{a_type(origin)} of {f'{length} ' if length else ''}{_without_article(each.words)}", (), accepts)
    return _Kind({types.NoneType: "None", types.EllipsisType: "'...'"}.get(origin) or a_type(origin), (origin,))


def _fits(x: Any, kind: _Kind) -> bool:
    return isinstance(x, kind.types) or (kind.accepts is not None and kind.accepts(x))


def _without_article(words: str) -> str:
    return words.removeprefix("an ").removeprefix("a ")


def _join(words: Sequence[str], conjunction: str = "or") -> str:
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}" if len(words) > 1 else words[0]
