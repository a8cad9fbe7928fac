"""The jit objects of a mapped function."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist.mapping import placement
from jax_dist.mapping.attempts import Attempt
from jax_dist.mapping.calls import Options, bind
from jax_dist.mapping.region import run_mapped
from jax_dist.passes.asking import meshes_of
from jax_dist.passes.capture_policy import Policy, Watch
from jax_dist.passes.captures import Capture
from jax_dist.passes.gathers import plan_gathers
from jax_dist.passes.interpreter import Values
from jax_dist.passes.lifting import LiftedJit, NewCaptures, Traced
from jax_dist.passes.pipeline import Pass, evaluate_through
from jax_dist.passes.primitives import GATHERS


class PlainJit:
    """A jit object with the methods of a `LiftedJit`; nothing is lifted or rewritten.

    Attributes:
      dispatch: the jit object.
    """

    def __init__(self, jitted: Any):
        self.dispatch = self.call = jitted
        self.lower, self.trace, self.clear_cache = jitted.lower, jitted.trace, jitted.clear_cache

    def settle(self, found: NewCaptures, args: tuple, kwargs: dict) -> Any:
        raise AssertionError("nothing is lifted here") from found


def program_of(
    options: Options,
    fun: Callable[[], Callable],
    trace: Callable[[tuple, dict], Any],
    look: Callable[[ClosedJaxpr], None],
) -> LiftedJit | PlainJit:
    """The program over `trace(args, kwargs)`, under the name of the user's function.

    Args:
      options: what was said to pmap.
      fun: gives the user's function, in which captured arrays have their names.
      trace: runs the mapped function on tracers.
      look: is shown what the trace gave; with several processes only, for a `PlainJit`.
    """
    if not _compat.CAN_REWRITE or (options.captures, options.gathers) == ("allow", "keep"):
        return PlainJit(jit_of(options, _looked_at(trace, look)))
    passes = [Pass(GATHERS, plan_gathers)] if options.gathers == "reduce" else []

    def emit(traced: Traced, lifted: Sequence[Capture], inputs: Sequence[Any]) -> Values:
        look(traced.jaxpr)
        return evaluate_through(passes, traced, lifted, inputs)[0]

    name, policy = options.choice.fun_name, Policy(options.captures, follows=False)
    return LiftedJit(
        fun,
        name,
        call=lambda *args, **kwargs: trace(args, kwargs),
        policy=policy,
        watch=Watch(name, policy),
        options=_compat.JitOptions(static_argnums=options.static, donate_argnums=options.donated),
        emit=emit,
        place=lambda traced, value: _on_all_devices(traced.jaxpr, value),
    )


def _looked_at(
    trace: Callable[[tuple, dict], Any], look: Callable[[ClosedJaxpr], None]
) -> Callable[[tuple, dict], Any]:
    """With several processes, traces to a jaxpr first, and shows it."""

    def trace_and_look(args: tuple, kwargs: dict) -> Any:
        if jax.process_count() == 1:
            return trace(args, kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]

        def flat(*values: Any) -> Any:
            filled = list(leaves)  # static arguments stay as they are
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            return trace(*jax.tree.unflatten(structure, filled))

        jitted = jax.jit(flat)
        tracers = [leaves[place] for place in places]
        look(jitted.trace(*tracers).jaxpr)
        return jitted(*tracers)

    return trace_and_look


def jit_of(options: Options, trace: Callable[[tuple, dict], Any]) -> Any:
    """The jit object over `trace(args, kwargs)`, under the name of the user's function."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        return trace(args, kwargs)

    # No functools.wraps: jit would read the user's signature and donate by keyword too.
    traced.__name__ = traced.__qualname__ = options.choice.fun_name
    return jax.jit(traced, static_argnums=options.static, donate_argnums=options.donated)


def jit_alone(options: Options, fun: Callable[[], Callable], *, whole: bool) -> Any:
    """A jit object that looks at no arguments.

    Args:
      options: what was said to pmap.
      fun: gives the function.
      whole: whether the arguments hold the slices of all processes, or those of this one.
    """

    def trace(args: tuple, kwargs: dict) -> Any:
        call = bind(options, fun(), args, kwargs)
        with Attempt():
            return run_mapped(options, call, whole=whole)[0]

    return jit_of(options, trace)


def _on_all_devices(jaxpr: ClosedJaxpr, value: Any) -> Any:
    meshes = meshes_of(jaxpr, ())
    return placement.replicate(value, meshes[0]) if meshes else value
