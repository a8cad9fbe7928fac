"""Lowered and compiled programs that take captured arrays, seen as if they did not.

What `lower` and `compile` give is called, and described, like the user's function: the captured
arrays are handed in behind the scenes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

_OF_ARGUMENTS = ("args_info", "in_avals", "input_formats", "input_shardings")  # of (args, kwargs)


def lowered_without(lowered: jax.stages.Lowered, values: Sequence[Any]) -> jax.stages.Lowered:
    """The program without its first argument, which is always `values`."""
    return _Lowered(lowered, values)


def _hiding(stage: type) -> type:
    """A class with the names of `stage`, which answers for another object of it."""

    class Hiding(stage):
        __slots__ = ("_inner", "_values")

        def __init__(self, inner: Any, values: Sequence[Any]):
            self._inner, self._values = inner, values

        @property
        def in_tree(self) -> Any:
            numbers = jax.tree.unflatten(self._inner.in_tree, range(self._inner.in_tree.num_leaves))
            return jax.tree.structure(_without_first(numbers))

        @property
        def donate_argnums(self) -> tuple[int, ...]:
            hidden = len(self._values)
            return tuple(number - hidden for number in self._inner.donate_argnums)

    for name in dir(stage):
        if not name.startswith("_") and name not in vars(Hiding):
            setattr(Hiding, name, property(_answer(name)))
    Hiding.__name__ = Hiding.__qualname__ = stage.__name__
    return Hiding


def _answer(name: str) -> Callable[[Any], Any]:
    def answer(self: Any) -> Any:
        told = getattr(self._inner, name)
        return _without_first(told) if name in _OF_ARGUMENTS else told

    return answer


def _without_first(of_call: tuple[tuple, dict]) -> tuple[tuple, dict]:
    (_, *args), kwargs = of_call
    return tuple(args), kwargs


class _Lowered(_hiding(jax.stages.Lowered)):
    __slots__ = ()

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        return _Compiled(self._inner.compile(*args, **kwargs), self._values)


class _Compiled(_hiding(jax.stages.Compiled)):
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(self._values, *args, **kwargs)
