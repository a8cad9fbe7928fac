"""A jit object whose captured arrays are arguments.

What a function captures is known only after it was traced. So the first trace raises
`NewCaptures` where it finds some; the call catches it, places the arrays, makes a jit object that
takes them as its first argument, and calls again, with the jaxpr that is there already. Later calls
are one C++ dispatch. jit's C++ cache remembers a signature that failed, and is slow for it ever
after; the jit object with such a signature is not used again.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist.passes import capture_policy
from jax_dist.passes import captures as capturing
from jax_dist.passes.capture_policy import Policy, Watch
from jax_dist.passes.captures import Capture
from jax_dist.passes.interpreter import Values

_WATCHED = 1024  # calls in which to look whether captured objects have changed


class NewCaptures(BaseException):
    """The trace found arrays that should be arguments, and are not yet."""

    def __init__(self, traced: "Traced"):
        super().__init__()
        self.traced = traced


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """The user's function as JAX sees it for one signature."""

    jaxpr: ClosedJaxpr  # of the dynamic leaves
    as_it_is: Callable[..., Values]  # a jit object that holds the jaxpr: calling it traces nothing
    found: tuple[Capture, ...]  # all captures; none where they are allowed
    captures: tuple[Capture, ...]  # those worth lifting
    places: tuple[int, ...]  # of the dynamic leaves among all
    signature: tuple
    out_tree: Any


class Emit(Protocol):
    """Evaluates a program in the current trace."""

    def __call__(self, traced: Traced, lifted: Sequence[Capture], inputs: Sequence[Any]) -> Values:
        """The inputs are the lifted arrays, in order, and then the dynamic leaves."""
        ...


def evaluator(traced: Traced, lifted: Sequence[Capture]) -> Callable[..., Values]:
    """The program as a function of the lifted arrays and the dynamic leaves."""
    if not lifted:
        return traced.as_it_is

    def evaluate(*inputs: Any) -> Values:
        values, args = inputs[: len(lifted)], inputs[len(lifted) :]
        return capturing.evaluate_lifted(traced.jaxpr, lifted, values, args)

    return evaluate


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
      dispatch: what a call goes through; in the steady state one C++ call. It may raise
        NewCaptures, for `settle`; `call` does not.
    """

    def __init__(
        self,
        fun: Callable[[], Callable],
        name: str,
        *,
        call: Callable,
        policy: Policy,
        watch: Watch,
        options: _compat.JitOptions,
        emit: Emit,
        place: Callable[[Traced, Any], Any],
        changed: Callable[[], None] = lambda: None,
    ):
        """
        Args:
          fun: gives the user's function, in which the captures have their names.
          name: of the program.
          call: what is traced.
          policy: what to do with captures.
          watch: tells the user of them.
          options: of the jit.
          emit: evaluates what was traced.
          place: puts a captured array where the traced program will use it.
          changed: called when `dispatch` is another.
        """
        self.name, self.policy = name, policy
        self._fun, self._traced_call = fun, call
        self._options, self._emit, self._place = options, emit, place
        self._changed = changed
        self._watch = watch
        self._inside_jit = self._generation((), (), lifts=False)
        self._current = self._generation((), (), lifts=True)
        self.dispatch: Callable = self._current.jitted

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call, whatever is captured."""
        try:
            return self.dispatch(*args, **kwargs)
        except NewCaptures as captures:
            found = captures
        return self.settle(found, args, kwargs)

    def settle(self, found: NewCaptures, args: tuple, kwargs: dict) -> Any:
        """Makes the call whose trace found captures that are not arguments yet."""
        return self._again(found, lambda jit, values: jit(*values, *args, **kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._ask(lambda jit, values: jit.lower(*values, *args, **kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._ask(lambda jit, values: jit.trace(*values, *args, **kwargs))

    def clear_cache(self) -> None:
        self._current.jitted.clear_cache()

    def _ask(self, ask: Callable[[Any, tuple], Any]) -> Any:
        try:
            return ask(self._current.jitted, self._values(self._current))
        except NewCaptures as captures:
            found = captures
        return self._again(found, ask)

    def _again(self, found: NewCaptures, ask: Callable[[Any, tuple], Any]) -> Any:
        while True:
            staged = _is_staged()
            if not (staged and _outer.lifts):
                self._watch.warn_of(found.traced.captures, lifted=not staged)
            generation = self._inside_jit if staged else self._extended(found.traced)
            generation.pending = found.traced
            try:
                return ask(generation.jitted, self._values(generation))
            except NewCaptures as more:  # the arguments have changed in between
                found = more

    def _extended(self, traced: Traced) -> _Generation:
        """The next generation: it takes the captures of this trace too.

        What the last one had compiled is compiled again when it is wanted. That is once, for all
        signatures of a function mostly capture the same.
        """
        current = self._current
        known = {self._identity(capture) for capture in current.captures}
        new = [c for c in traced.captures if self._identity(c) not in known]
        values = (*current.values, *[self._place(traced, _as_it_is(c.value)) for c in new])
        generation = self._generation((*current.captures, *new), values, lifts=True)
        self._use(generation)
        return generation

    def _use(self, generation: _Generation) -> None:
        self._current = generation
        self.dispatch = self._call_of(generation) if generation.captures else generation.jitted
        self._changed()

    def _call_of(self, generation: _Generation) -> Callable:
        """A call with captured arrays."""
        if self.policy.live:
            return lambda *args, **kwargs: generation.jitted(
                *self._values(generation), *args, **kwargs
            )
        call = functools.partial(generation.jitted, generation.values)
        if not any(capture.read for capture in generation.captures):
            return call
        calls = 0

        def watching(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if not calls & (calls - 1):  # 1, 2, 4, 8, ...: looking takes time for each capture
                self._watch.look(generation.captures, generation.values)
            if calls == _WATCHED and self.dispatch is watching:
                self.dispatch = call
                self._changed()
            return call(*args, **kwargs)

        return watching

    def _values(self, generation: _Generation) -> tuple[Any, ...]:
        """What the jit object takes before the arguments: the captured arrays, if there are any."""
        if not generation.captures:
            return ()
        if not self.policy.live:
            return (generation.values,)
        return (self._watch.current(generation.captures, generation.values),)

    def _identity(self, capture: Capture) -> Any:
        """Which captures are the same: those of one object, or of one name where it is followed."""
        return capture.name if self.policy.live and capture.read else capture.key

    def _generation(
        self, captures: tuple[Capture, ...], values: tuple[Any, ...], *, lifts: bool
    ) -> _Generation:
        generation = _Generation(captures, values, lifts)

        def traced(*args: Any, **kwargs: Any) -> Any:
            captured = args[0] if captures else ()
            return self._trace(generation, captured, args[bool(captures) :], kwargs)

        # No functools.wraps: jit would read the user's signature and donate by keyword too.
        traced.__name__ = traced.__qualname__ = self.name
        options, first = self._options, bool(captures)
        generation.jitted = jax.jit(
            traced,
            static_argnums=tuple(first + number for number in options.static_argnums),
            static_argnames=options.static_argnames or None,
            donate_argnums=tuple(first + number for number in options.donate_argnums),
            donate_argnames=options.donate_argnames or None,
            keep_unused=options.keep_unused,
            compiler_options=options.compiler_options,
        )
        return generation

    def _trace(self, generation: _Generation, captured: tuple, args: tuple, kwargs: dict) -> Any:
        """What jit traces."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        signature = _signature(leaves, tree)
        traced, generation.pending = generation.pending, None
        if traced is None or traced.signature != signature:
            traced = self._look_at(leaves, tree, signature)
        held = {
            self._identity(capture): value
            for capture, value in zip(generation.captures, captured, strict=True)
        }
        if generation.lifts and any(self._identity(c) not in held for c in traced.captures):
            raise NewCaptures(traced)
        lifted = [c for c in traced.captures if self._identity(c) in held]
        inputs = [held[self._identity(c)] for c in lifted]
        inputs += [leaves[place] for place in traced.places]
        return jax.tree.unflatten(traced.out_tree, self._emit(traced, lifted, inputs))

    def _look_at(self, leaves: Sequence[Any], tree: Any, signature: tuple) -> Traced:
        """Traces the user's function; his Python runs here, once per signature."""
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        static = [None if isinstance(leaf, Tracer) else leaf for leaf in leaves]
        out_trees = []

        def flat(*dynamic: Any) -> list[Any]:
            filled = list(static)
            for place, value in zip(places, dynamic, strict=True):
                filled[place] = value
            args, kwargs = jax.tree.unflatten(tree, filled)
            flat_output, out_tree = jax.tree.flatten(self._traced_call(*args, **kwargs))
            out_trees.append(out_tree)
            return flat_output

        flat.__name__ = flat.__qualname__ = self.name
        as_it_is = jax.jit(flat)
        with _lifting_outside(lifts=self.policy.captures == "lift"):
            jaxpr = as_it_is.trace(*[leaves[place] for place in places]).jaxpr
        looks = self.policy.captures != "allow"
        found = capturing.find_captures(jaxpr, self._fun()) if looks else ()
        captures = capture_policy.worth_lifting(found, self.name, self.policy)
        return Traced(jaxpr, as_it_is, found, captures, tuple(places), signature, out_trees[-1])


def _as_it_is(value: Any) -> Any:
    """A copy of a NumPy array: on CPU, JAX may share its memory, and later writes would be seen."""
    return np.array(value) if isinstance(value, np.ndarray) else value


class _Outer(threading.local):
    lifts: bool = False  # whether what is traced now is part of another program that will lift


_outer = _Outer()


@contextlib.contextmanager
def _lifting_outside(*, lifts: bool) -> Iterator[None]:
    before, _outer.lifts = _outer.lifts, lifts
    try:
        yield
    finally:
        _outer.lifts = before


def _signature(leaves: Sequence[Any], tree: Any) -> tuple:
    """What a trace depends on: types of the dynamic leaves, values of the static ones."""
    return (
        tree,
        *[jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf for leaf in leaves],
    )


def _is_staged() -> bool:
    """Whether what is computed now is recorded for later, by a jit or a scan around."""
    return isinstance(jax.device_put(0.0), Tracer)  # compiles nothing
