"""One dispatcher for each function and set of options, kept as long as the function lives.

So `pmap(f)(x)` in a loop traces once. A function is known by identity. A bound method, which is
another object at each access, is known by its function and its object, as JAX knows it; a partial
object that holds plain values only, by its function and these. All are held weakly, for a
dispatcher must not keep its own key alive.
"""

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from jax_dist.mapping.dispatch import Dispatcher

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_known: dict[Hashable, "_Known"] = {}


class _Known(NamedTuple):
    """The dispatchers of one function."""

    parts: list[weakref.ref]  # what the function consists of; when one dies, so does this
    by_options: dict[Hashable, Dispatcher]

    def is_alive(self) -> bool:
        return all(part() is not None for part in self.parts)


class _Identity(NamedTuple):
    """How a callable is told from others, and made again."""

    key: Hashable
    parts: list[Any]
    build: Callable[..., Callable]  # from the parts


def get(fun: Callable, asked: tuple[Any, ...]) -> Dispatcher | None:
    """The dispatcher for a function with these options, if there is one."""
    known = _known.get(_identity(fun).key)
    if known is None or not known.is_alive():
        return None
    try:
        return known.by_options.get(asked)
    except TypeError:  # a dict or list among the axes
        return known.by_options.get(_hashable(asked))


def put(
    fun: Callable, asked: tuple[Any, ...], make: Callable[[Callable[[], Callable]], Dispatcher]
) -> Dispatcher:
    """A new dispatcher; remembered, unless the function cannot be held weakly.

    Args:
      fun: the function.
      asked: the options.
      make: makes a dispatcher, which is told how to get the function while that lives.
    """
    key, parts, build = _identity(fun)
    known = _known.get(key)
    if known is None or not known.is_alive():
        try:
            known = _Known([weakref.ref(part, _forget(key)) for part in parts], {})
        except TypeError:
            return make(lambda: fun)
        _known[key] = known
    references = known.parts
    dispatcher = make(lambda: build(*[reference() for reference in references]))
    try:
        known.by_options[asked] = dispatcher
    except TypeError:
        known.by_options[_hashable(asked)] = dispatcher
    return dispatcher


def _identity(fun: Callable) -> _Identity:
    if isinstance(fun, types.MethodType):
        owner, function = fun.__self__, fun.__func__
        return _Identity((id(function), id(owner)), [function, owner], types.MethodType)
    if isinstance(fun, functools.partial) and type(fun) is functools.partial:
        values = (*fun.args, *fun.keywords.values())
        if all(isinstance(value, _PLAIN) for value in values):
            args, keywords, inner = fun.args, fun.keywords, _identity(fun.func)
            kinds = tuple(map(type, values))  # for 1, 1.0 and True are equal
            key = (inner.key, args, tuple(keywords.items()), kinds)

            def build(*parts: Any) -> Callable:
                return functools.partial(inner.build(*parts), *args, **keywords)

            return _Identity(key, inner.parts, build)
    return _Identity(id(fun), [fun], lambda function: function)


def _forget(key: Hashable) -> Callable[[weakref.ref], None]:
    everything = _known  # also when the globals of this module are gone, as Python ends

    def forget(part: weakref.ref) -> None:
        known = everything.get(key)
        if known is not None and part in known.parts:  # not what has the same address since
            del everything[key]

    return forget


def _hashable(asked: tuple[Any, ...]) -> tuple:
    """The same request with its containers flattened."""
    leaves, structure = jax.tree.flatten(asked, is_leaf=lambda node: node is None)
    return (*leaves, structure)
