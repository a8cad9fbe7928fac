"""A jit object whose captured arrays are arguments.

What a function captures is known only after it was traced. So the first trace raises
`NewCaptures` where it finds some; the call catches it, places the arrays, makes a jit object that
takes them as its first argument, and calls again, with the jaxpr that is there already. Later calls
are one C++ dispatch. jit's C++ cache remembers a signature that failed, and is slow for it ever
after; the jit object with such a signature is not used again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist.passes import capture_policy
from jax_dist.passes import captures as capturing
from jax_dist.passes.capture_policy import Policy
from jax_dist.passes.captures import Capture
from jax_dist.passes.interpreter import Values, constants, open_jaxpr


class NewCaptures(BaseException):
    """The trace found arrays that should be arguments, and are not yet."""

    def __init__(self, traced: "Traced"):
        super().__init__()
        self.traced = traced


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """The user's function as JAX sees it for one signature."""

    jaxpr: ClosedJaxpr  # of the dynamic leaves
    captures: tuple[Capture, ...]  # those worth lifting
    places: tuple[int, ...]  # of the dynamic leaves among all
    signature: tuple
    out_tree: Any


class Emit(Protocol):
    """Evaluates a program in the current trace."""

    def __call__(
        self,
        traced: Traced,
        evaluate: Callable[..., Values],
        inputs: Sequence[Any],
        lifted: Sequence[Capture],
    ) -> Values:
        """`evaluate(*inputs)`, or better; the inputs are the lifted arrays, then the leaves."""
        ...


def emit_as_is(
    traced: Traced,
    evaluate: Callable[..., Values],
    inputs: Sequence[Any],
    lifted: Sequence[Capture],
) -> Values:
    del traced, lifted
    return evaluate(*inputs)


@dataclasses.dataclass(eq=False, slots=True)
class _Generation:
    """One jit object, and the captured arrays that it takes."""

    captures: tuple[Capture, ...]
    values: tuple[Any, ...]
    lifts: bool  # whether it asks for what it lacks
    jitted: Any = None
    pending: Traced | None = None  # a trace that another generation has made


class LiftedJit:
    """`jax.jit(fun)`, with the arrays that `fun` captures as arguments.

    Attributes:
      dispatch: what a call goes through; in the steady state `jit(values, ...)` and no more.
    """

    def __init__(
        self,
        fun: Callable,
        name: str,
        *,
        call: Callable | None = None,
        policy: Policy = capture_policy.DEFAULT,
        options: _compat.JitOptions = _compat.JitOptions(),
        emit: Emit = emit_as_is,
        place: Callable[[Traced, Any], Any] = lambda traced, value: value,
    ):
        """`fun` names the captures; `call`, if given, is traced in its place.

        `place` puts a captured array where the traced program will use it.
        """
        self.fun, self.name, self.policy = fun, name, policy
        self._call = fun if call is None else call
        self._options, self._emit, self._place = options, emit, place
        self._watch = capture_policy.Watch(name, policy)
        self._inside_jit = self._generation((), (), lifts=False)
        self._use(self._generation((), (), lifts=True))

    def settle(self, found: NewCaptures, args: tuple, kwargs: dict) -> Any:
        """Makes the call whose trace found captures that are not arguments yet."""
        return self._again(found, lambda g: g.jitted(self._values(g), *args, **kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._ask(lambda g: g.jitted.lower(self._values(g), *args, **kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._ask(lambda g: g.jitted.trace(self._values(g), *args, **kwargs))

    def clear_cache(self) -> None:
        self._current.jitted.clear_cache()

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captured arrays that are arguments now."""
        return self._current.captures

    def _ask(self, ask: Callable[[_Generation], Any]) -> Any:
        try:
            return ask(self._current)
        except NewCaptures as found:
            return self._again(found, ask)

    def _again(self, found: NewCaptures, ask: Callable[[_Generation], Any]) -> Any:
        while True:
            staged = _is_staged()
            self._watch.warn_of(found.traced.captures, lifted=not staged)
            if staged:
                generation = self._inside_jit
            else:
                generation = self._extended(found.traced)
                self._use(generation)
            generation.pending = found.traced
            try:
                return ask(generation)
            except NewCaptures as more:  # the arguments have changed in between
                found = more

    def _extended(self, traced: Traced) -> _Generation:
        """The next generation: it takes the captures of this trace too."""
        current = self._current
        known = {self._identity(capture) for capture in current.captures}
        new = [c for c in traced.captures if self._identity(c) not in known]
        values = (*current.values, *[self._place(traced, c.origin) for c in new])
        return self._generation((*current.captures, *new), values, lifts=True)

    def _use(self, generation: _Generation) -> None:
        self._current = generation
        self.dispatch: Callable = (
            self._call_watching
            if generation.captures
            else functools.partial(generation.jitted, generation.values)
        )

    def _call_watching(self, *args: Any, **kwargs: Any) -> Any:
        generation = self._current
        if self.policy.live:
            return generation.jitted(self._values(generation), *args, **kwargs)
        self._watch.look(generation.captures, generation.values)
        return generation.jitted(generation.values, *args, **kwargs)

    def _values(self, generation: _Generation) -> tuple[Any, ...]:
        if not self.policy.live:
            return generation.values
        return self._watch.current(generation.captures, generation.values)

    def _identity(self, capture: Capture) -> Any:
        """Which captures are the same: those of one object, or of one name where it is followed."""
        return capture.name if self.policy.live and capture.read else capture.key

    def _generation(
        self, captures: tuple[Capture, ...], values: tuple[Any, ...], *, lifts: bool
    ) -> _Generation:
        generation = _Generation(captures, values, lifts)

        def traced(captured: tuple, *args: Any, **kwargs: Any) -> Any:
            return self._trace(generation, captured, args, kwargs)

        # No functools.wraps: jit would read the user's signature and donate by keyword too.
        traced.__name__ = traced.__qualname__ = self.name
        options = self._options
        generation.jitted = jax.jit(
            traced,
            static_argnums=tuple(1 + number for number in options.static_argnums),
            static_argnames=options.static_argnames or None,
            donate_argnums=tuple(1 + number for number in options.donate_argnums),
            donate_argnames=options.donate_argnames or None,
            keep_unused=options.keep_unused,
            compiler_options=options.compiler_options,
        )
        return generation

    def _trace(self, generation: _Generation, captured: tuple, args: tuple, kwargs: dict) -> Any:
        """What jit traces."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
        signature = _signature(leaves, tree)
        traced, generation.pending = generation.pending, None
        if traced is None or traced.signature != signature:
            traced = self._look_at(leaves, tree, places, signature)
        held = {
            self._identity(capture): value
            for capture, value in zip(generation.captures, captured, strict=True)
        }
        if generation.lifts and any(self._identity(c) not in held for c in traced.captures):
            raise NewCaptures(traced)
        lifted = [c for c in traced.captures if self._identity(c) in held]
        inputs = [held[self._identity(c)] for c in lifted] + [leaves[place] for place in places]
        flat = self._emit(traced, _evaluator(traced.jaxpr, lifted), inputs, lifted)
        return jax.tree.unflatten(traced.out_tree, flat)

    def _look_at(
        self, leaves: Sequence[Any], tree: Any, places: Sequence[int], signature: tuple
    ) -> Traced:
        """Traces the user's function; his Python runs here, once per signature."""
        out_trees = []

        def flat(*dynamic: Any) -> list[Any]:
            filled = list(leaves)
            for place, value in zip(places, dynamic, strict=True):
                filled[place] = value
            args, kwargs = jax.tree.unflatten(tree, filled)
            flat_output, out_tree = jax.tree.flatten(self._call(*args, **kwargs))
            out_trees.append(out_tree)
            return flat_output

        flat.__name__ = flat.__qualname__ = self.name
        jaxpr = jax.make_jaxpr(flat)(*[leaves[place] for place in places])
        captures = capture_policy.worth_lifting(jaxpr, self.fun, self.name, self.policy)
        return Traced(jaxpr, captures, tuple(places), signature, out_trees[-1])


def _evaluator(jaxpr: ClosedJaxpr, lifted: Sequence[Capture]) -> Callable[..., Values]:
    if not lifted:
        return lambda *inputs: jax.core.eval_jaxpr(open_jaxpr(jaxpr), constants(jaxpr), *inputs)

    def evaluate(*inputs: Any) -> Values:
        values, args = inputs[: len(lifted)], inputs[len(lifted) :]
        return capturing.evaluate_lifted(jaxpr, lifted, values, args)

    return evaluate


def _signature(leaves: Sequence[Any], tree: Any) -> tuple:
    """What a trace depends on: types of the dynamic leaves, values of the static ones."""
    return (
        tree,
        *[jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf for leaf in leaves],
    )


def _is_staged() -> bool:
    """Whether what is computed now is recorded for later, by a jit or a scan around."""
    return isinstance(jax.numpy.zeros(()), jax.core.Tracer)
