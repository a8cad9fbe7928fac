"""Parts of programs that pmap, rewrite and global_view share.

Lowered and Compiled, as the user sees them, hide the captured arrays; and calls on CPU wait for
their result now and then.
"""

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jax_dist import _compat
from jax_dist._rewrite.interpreter import OURS

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_OF_ARGUMENTS = ("args_info", "in_avals", "input_formats", "input_shardings")  # of (args, kwargs)


def _hiding(stage: type) -> type:
    """Return a class with the names of `stage`, which answers for another object of it."""

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

    def answer(self: Any, name: str) -> Any:
        value = getattr(self._inner, name)
        return _without_first(value) if name in _OF_ARGUMENTS else value

    for name in dir(stage):
        if not name.startswith("_") and name not in vars(Hiding):
            setattr(Hiding, name, property(lambda self, name=name: answer(self, name)))
    Hiding.__name__ = Hiding.__qualname__ = stage.__name__
    return Hiding


def _without_first(of_call: tuple[_Args, _Kwargs]) -> tuple[_Args, _Kwargs]:
    (_, *args), kwargs = of_call
    return tuple(args), kwargs


class Lowered(_hiding(jax.stages.Lowered)):
    """A program without its first argument, which is always the values that it is made with."""

    __slots__ = ()

    def compile(self, /, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        return _Compiled(self._inner.compile(*args, **kwargs), self._values)


class _Compiled(_hiding(jax.stages.Compiled)):
    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._inner(self._values, *args, **kwargs)


# --- calls


def is_staged() -> bool:
    """Return whether what is computed now is recorded for later, by a jit or a scan around."""
    with jax.transfer_guard("allow"):
        return isinstance(jax.device_put(0.0), Tracer)  # compiles nothing


# The CPU backend of JAX hangs over too many calls in flight: its devices take 32 executions each,
# and dispatch then waits, in the middle of one that other devices wait for in a collective. So
# there, every sixteenth call of this process waits for its own result. Asking takes 30 ns.
_turns = itertools.cycle([*[False] * 15, True])


def can_be_full(mesh: Mesh) -> bool:
    """Return whether calls of a program on these devices have to wait now and then."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return _compat.CPU_HANGS_WHEN_FULL and is_cpu and mesh.size > 1


def throttled(call: Callable) -> Callable:
    """Return the call with every sixteenth one waiting for its result."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs) if kwargs else call(*args)
        return jax.block_until_ready(output) if next(_turns) else output

    return waiting


def hide_own_frames(error: Exception) -> None:
    """Take the frames of this package out of the traceback.

    JAX hides its own frames likewise, and only at its own functions;
    `JAX_TRACEBACK_FILTERING=off` shows all, here as there.
    """
    if _compat.config_value("jax_traceback_filtering") == "off":
        return
    frames, step = [], error.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(OURS):
            frames.append(step)
        step = step.tb_next
    shown: types.TracebackType | None = None
    for step in reversed(frames):
        shown = types.TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = shown
