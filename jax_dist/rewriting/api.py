"""`rewrite` and `explain`."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jax_dist import _compat, _errors
from jax_dist._errors import UnsupportedError
from jax_dist.mapping.attempts import entry
from jax_dist.passes.capture_policy import Captures
from jax_dist.passes.lifting import NewCaptures
from jax_dist.rewriting import arguments, program, reporting
from jax_dist.rewriting.arguments import Gathers, Partitioning, Specs
from jax_dist.rewriting.program import RewrittenProgram
from jax_dist.rewriting.report import Report


class Rewritten(Protocol):
    """A rewritten function: called like the one it was made from."""

    __wrapped__: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The rewritten jaxpr for these arguments."""
        ...

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """What the rewriting does for these arguments; compiles, and runs nothing."""
        ...


def rewrite(
    fun: Callable,
    *,
    mesh: Mesh | None = None,
    captures: Captures = "lift",
    gathers: Gathers = "reduce",
    partitioning: Partitioning = "route",
    specs: Specs | None = None,
    live_captures: bool = False,
    warn_bytes: int = 1024,
    lift_bytes: int = 1024,
) -> Rewritten:
    """The same function, with what makes its program wrong, slow or never cached put right.
    """
    wishes = arguments.checked(
        fun,
        mesh=mesh,
        captures=captures,
        gathers=gathers,
        partitioning=partitioning,
        specs=specs,
        live_captures=live_captures,
        warn_bytes=warn_bytes,
        lift_bytes=lift_bytes,
    )
    if not _compat.CAN_REWRITE:
        raise UnsupportedError(f"jax_dist.rewrite needs jax 0.10 or later, not {jax.__version__}")
    return _wrapped(fun, RewrittenProgram(fun, _name_of(fun), wishes))


def explain(
    fun: Callable,
    *args: Any,
    mesh: Mesh | None = None,
    captures: Captures = "lift",
    gathers: Gathers = "reduce",
    partitioning: Partitioning = "route",
    specs: Specs | None = None,
    **kwargs: Any,
) -> Report:
    """What `rewrite` would do with a function, and what not, and why."""
    rewritten = rewrite(
        fun,
        mesh=mesh,
        captures=captures,
        gathers=gathers,
        partitioning=partitioning,
        specs=specs,
    )
    return rewritten.report(*args, **kwargs)


def _wrapped(fun: Callable, dispatcher: RewrittenProgram) -> Any:
    """The closure that the user calls. What stands here is paid for in every call."""

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        try:
            if kwargs:
                return dispatcher.dispatch(*args, **kwargs)
            return dispatcher.dispatch(*args)
        except NewCaptures as captures:
            found = captures
        return dispatcher.settle(found, args, kwargs)

    def lower(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return program.ask("lower", dispatcher, args, kwargs)

    def trace(*args: Any, **kwargs: Any) -> jax.stages.Traced:
        return program.ask("trace", dispatcher, args, kwargs)

    def report(*args: Any, **kwargs: Any) -> Report:
        return reporting.report_of(fun, dispatcher, args, kwargs)

    extra: Any = functools.update_wrapper(entry(rewritten), fun)
    extra.lower, extra.trace = lower, trace
    extra.report = report
    return extra


def _name_of(fun: Any) -> str:
    """A name without an address in it, for it is part of the program and of its cache key."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)
