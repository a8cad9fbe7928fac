"""What was found out about a function for one signature, remembered by JAX.

A signature is all that a trace depends on: types, static values, settings such as x64. JAX keeps
its traces by it, and forgets them with `jax.clear_caches()`. So a function is traced by a jit
object whose result has no arrays, only a token: the token leads to what belongs to it.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_dist._compat import JitOptions


class Memo:
    """Remembers what `trace` gives for a signature."""

    def __init__(self, name: str, trace: Callable[[tuple, dict], Any], options: JitOptions):
        """
        Args:
          name: of the function, as JAX reports it.
          trace: takes arguments and keywords, as tracers; what it gives holds none of them.
          options: which arguments are static.
        """
        self._name, self._trace, self._options = name, trace, options

    @functools.cached_property
    def _found(self) -> "weakref.WeakKeyDictionary[_Token, Any]":
        # Caches of JAX may keep a token longer than this lives; what it stands for, they do not.
        return weakref.WeakKeyDictionary()

    @functools.cached_property
    def _jitted(self) -> Any:
        found, trace = self._found, self._trace

        def traced(*args: Any, **kwargs: Any) -> "_Result":
            token = _Token()
            found[token] = trace(args, kwargs)
            return _Result(token)

        # No functools.wraps: jit would read the user's signature.
        traced.__name__ = traced.__qualname__ = self._name
        return jax.jit(
            traced,
            static_argnums=self._options.static_argnums,
            static_argnames=self._options.static_argnames or None,
        )

    def of(self, args: tuple, kwargs: dict) -> Any:
        """What belongs to arguments of these types; their values do not matter."""
        result: Any = self._jitted.trace(*args, **kwargs).out_info
        return self._found[result.token]

    def clear(self) -> None:
        self._jitted.clear_cache()


class _Token:
    """Stands for what was found for one signature."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class _Result:
    """Of a jit object: no arrays."""

    token: _Token

    def tree_flatten(self) -> tuple[tuple[()], _Token]:
        return (), self.token

    @classmethod
    def tree_unflatten(cls, token: _Token, _: Sequence[Any]) -> "_Result":
        return cls(token)
