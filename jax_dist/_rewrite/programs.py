"""The jit objects of one function, by the captured arrays that they take.

jit itself is the memo of what was found for a signature. Lowered and Compiled, as the user sees
them, hide the captured arrays.
"""

import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jax_dist import _compat
from jax_dist._compat import JitOptions
from jax_dist._rewrite.captures import (
    Lifted,
    PlacedCaptures,
    Placements,
    Watch,
    is_lifted_outside,
)
from jax_dist._rewrite.interpreter import OURS

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_OF_ARGUMENTS = ("args_info", "in_avals", "input_formats", "input_shardings")  # of (args, kwargs)


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

    def answer(self: Any, name: str) -> Any:
        told = getattr(self._inner, name)
        return _without_first(told) if name in _OF_ARGUMENTS else told

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


# --- what was found out about a function for one signature, remembered by JAX
#
# A signature is all that a trace depends on: types, static values, settings such as x64. JAX keeps
# its traces by it, and forgets them with `jax.clear_caches()`. So a function is traced by a jit
# object whose result has no arrays, only a token: the token leads to what belongs to it.


class Memo:
    """Remembers what `trace` gives for a signature."""

    def __init__(self, name: str, trace: Callable[[tuple, dict], Any], options: JitOptions):
        """`trace` takes arguments and keywords, as tracers; what it gives holds none of them."""
        self._name, self._trace, self._options = name, trace, options

    @functools.cached_property
    def _found(self) -> "weakref.WeakKeyDictionary[_Token, Any]":
        # Caches of JAX may keep a token longer than this lives; what it stands for, they do not.
        return weakref.WeakKeyDictionary()

    @functools.cached_property
    def _jitted(self) -> Any:
        found, trace = self._found, self._trace

        def traced(*flat_args: Any, **kwargs: Any) -> "_Token":  # see `Program`
            token = _Token()
            found[token] = trace(flat_args, kwargs)
            return token

        # No functools.wraps: jit would read the user's signature.
        traced.__name__ = traced.__qualname__ = self._name
        return jax.jit(
            traced,
            static_argnums=self._options.static_argnums,
            static_argnames=self._options.static_argnames or None,
        )

    def of(self, args: _Args, kwargs: _Kwargs) -> Any:
        """What belongs to arguments of these types; their values do not matter."""
        return self._found[self._jitted.trace(*args, **kwargs).out_info]


@jax.tree_util.register_static
class _Token:
    """Stands for what was found for one signature; to JAX, a result without arrays."""


# --- the jit objects of one function, and the calls of it that are under way
#
# A function has one jit object for each set of captured arrays, which are its first argument;
# mostly that is one. Each stands behind a front (see `_compat.front`): what the front does not
# know comes to `miss`, with the arguments.
#
# While a call runs a jit object, it stands on a stack of its thread; the trace of the jit object
# looks there for what the call has found out.


_Miss: TypeAlias = Callable[["Program", _Args, _Kwargs], _compat.Answer]
# Of captured arrays and arguments, as tracers.
_Trace: TypeAlias = Callable[[Sequence[Any], _Args, _Kwargs], Any]


class Program:
    """One jit object.

    Attributes:
      front: is called like `jitted`.
    """

    def __init__(self, programs: "Programs", *, takes_captures: bool):
        trace, name, options = programs.trace, programs.name, programs.options
        first = int(takes_captures)

        # Called as by jax.pmap. jit takes a keyword of the same name, as `args`, for a position.
        def traced(*flat_args: Any, **kwargs: Any) -> Any:
            return trace(flat_args[0] if first else (), flat_args[first:], kwargs)

        def miss(*args: Any, **kwargs: Any) -> _compat.Answer:
            return programs.miss(self, args[first:], kwargs)

        # No functools.wraps: jit would read the user's signature and donate by keyword too.
        traced.__name__ = traced.__qualname__ = name
        self._static = static = tuple(first + number for number in options.static_argnums)
        self._traced, self._options = traced, options
        self._donated = tuple(first + number for number in options.donate_argnums)
        self.front: Callable[..., Any] = _compat.front(
            name,
            miss,
            fun=traced,
            without_jit=lambda *args, **kwargs: programs.without_jit(*args[first:], **kwargs),
            static_argnums=static,
            static_argnames=options.static_argnames,
        )

    @functools.cached_property
    def jitted(self) -> Any:
        """Takes the captured arrays first, if there are any. Not made before it is needed."""
        options = self._options
        return jax.jit(
            self._traced,
            static_argnums=self._static,
            static_argnames=options.static_argnames or None,
            donate_argnums=self._donated,
            donate_argnames=options.donate_argnames or None,
            keep_unused=options.keep_unused,
            compiler_options=options.compiler_options,
        )


class Bound(NamedTuple):
    """A program, and the captured arrays that it takes first."""

    program: Program
    placed: PlacedCaptures | None

    def hiding(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A front or a jit object as a callable of the user's arguments."""
        return call if self.placed is None else functools.partial(call, self.placed.values)

    def lowered(self, lowered: jax.stages.Lowered) -> jax.stages.Lowered:
        """The program without its first argument, if that is what is captured."""
        return lowered if self.placed is None else Lowered(lowered, self.placed.values)


class Programs:
    """Those of one function, and what calls of it go through now.

    Attributes:
      used: the program of the last call, and most probably of the next one, too.
      front: runs it.
      watch: warns of captured arrays.
    """

    def __init__(
        self,
        name: str,
        options: _compat.JitOptions,
        *,
        trace: _Trace,
        miss: _Miss,
        without_jit: Callable[..., Any],
        around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call,
    ):
        """
        Args:
          name: of the programs.
          options: of the jit objects.
          trace: what they trace.
          miss: makes a call that a front does not know; is given the program of that front.
          without_jit: makes a call under `jax.disable_jit`.
          around: what callers call, from the front of the program that is used.
        """
        self.name = name
        self.options = options
        self.trace = trace
        self._miss = miss
        self.without_jit = without_jit
        self.watch: Watch = Watch(name)
        self._placements = Placements()
        self._nothing = PlacedCaptures(())
        self._made = weakref.WeakKeyDictionary[PlacedCaptures, dict[Hashable, Program]]()
        self._callers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._around = around
        self.used: Bound = Bound(self.plain(), None)
        self._is_full = False  # whether calls wait, so that not too many are under way
        self.front: Callable[..., Any] = self.used.program.front
        self._call = self.front

    def serve(self, caller: Any) -> None:
        """Keeps `caller.__call__` the fastest way to call."""
        self._callers.add(caller)
        caller.__call__ = self._call

    def renew(self) -> None:
        """Has the callers call what is around the front now."""
        self._call = self._around(self.front)
        for caller in self._callers:
            caller.__call__ = self._call

    def plain(self, variant: Hashable = None) -> Program:
        """The one that takes no captured arrays; `variant`: as below."""
        return self._of(self._nothing, variant)

    def bound(
        self,
        lifted: Lifted,
        where: Hashable,
        place: Callable[[Any], Any],
        variant: Hashable = None,
    ) -> Bound:
        """The one for what is lifted.

        Args:
          lifted: the function as it was traced.
          where: its captured arrays are placed.
          place: puts an array there.
          variant: what else tells programs of one signature apart.
        """
        placed = self._placements.of(lifted, where, place)
        if placed is None:
            return Bound(self.plain(variant), None)
        return Bound(self._of(placed, variant), placed)

    def _of(self, placed: PlacedCaptures, variant: Hashable) -> Program:
        made = self._made.setdefault(placed, {})
        if variant not in made:
            made[variant] = Program(self, takes_captures=placed is not self._nothing)
        return made[variant]

    def miss(self, program: Program, args: _Args, kwargs: _Kwargs) -> _compat.Answer:
        """Makes a call that the front of a program does not know."""
        try:
            return self._miss(program, args, kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    def run(
        self,
        bound: Bound,
        asking: Program,
        found: Any,
        args: _Args,
        kwargs: _Kwargs,
        mesh: Mesh | None,
    ) -> _compat.Answer:
        """Runs a program, for the front of another one (`asking`), which then remembers the call.

        Args:
          bound: the one to run.
          asking: that of the front that does not know the call.
          found: for this call.
          args: the user's.
          kwargs: the same.
          mesh: that it runs on, as far as that is one.
        """
        given = args if bound.placed is None else (bound.placed.values, *args)
        with self.under_way(found):
            results, memory, stale = _compat.run_jit(bound.program.jitted, given, kwargs)
        is_full = mesh is not None and can_be_full(mesh)
        if (self.used, self._is_full) != (bound, is_full):
            self.used, self._is_full = bound, is_full
            front = bound.hiding(bound.program.front)
            self.front = throttled(front) if is_full else front
            self.renew()
        return results, memory if bound.program is asking else None, stale

    def stage(
        self, program: Program, lifted: Lifted, found: Any, args: _Args, kwargs: _Kwargs
    ) -> Any:
        """A call that is part of a trace outside. Captured arrays become constants of that."""
        if not is_lifted_outside():
            self.watch.warn_of(lifted.captures, lifted=False)
        with self.under_way(found):
            return program.jitted(*args, **kwargs)

    def lower(self, bound: Bound, found: Any, args: _Args, kwargs: _Kwargs) -> jax.stages.Lowered:
        """The program with its captured arrays as arguments, for the user's arguments."""
        with self.under_way(found):
            return bound.hiding(bound.program.jitted.lower)(*args, **kwargs)

    @contextlib.contextmanager
    def under_way(self, found: Any) -> Iterator[None]:
        """One of them is called, traced or lowered inside."""
        _ways.stack.append((self, found))
        try:
            yield
        finally:
            _ways.stack.pop()

    def found(self) -> Any:
        """What the innermost call under way has found, if it is one of these; None without one."""
        top, found = _ways.stack[-1] if _ways.stack else (None, None)
        return found if top is self else None


def is_staged() -> bool:
    """Whether what is computed now is recorded for later, by a jit or a scan around."""
    with jax.transfer_guard("allow"):
        return isinstance(jax.device_put(0.0), Tracer)  # compiles nothing


class _Ways(threading.local):
    """The calls that run a jit object now: whose they are, and what they have found out."""

    def __init__(self):
        self.stack: list[tuple[Programs, Any]] = []


_ways = _Ways()


# --- not too many calls in flight
#
# The CPU backend of JAX hangs over too many: its devices take 32 executions each, and dispatch then
# waits, in the middle of one that other devices wait for in a collective. So there, every sixteenth
# call waits for its own result.


_WINDOW = 16  # calls in flight at most, of all functions of this process together

turns: Iterator[bool] = itertools.repeat(object=False)
"""Whether to wait after this call. Asking takes 30 ns, and enters no Python function."""
if _compat.CPU_HANGS_WHEN_FULL:
    turns = itertools.cycle([*[False] * (_WINDOW - 1), True])


def can_be_full(mesh: Mesh) -> bool:
    """Whether calls of a program on these devices have to wait now and then."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return _compat.CPU_HANGS_WHEN_FULL and is_cpu and mesh.size > 1


def throttled(call: Callable) -> Callable:
    """The same, with every sixteenth call waiting for its result."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs) if kwargs else call(*args)
        if next(turns):
            wait(output)
        return output

    return waiting


def wait(output: Any) -> None:
    """Until what a call returned is there, if several CPU devices compute it."""
    for leaf in jax.tree.leaves(output):  # all are there at the same time: the first one will do
        if isinstance(leaf, Tracer):
            return
        if isinstance(leaf, jax.Array):
            devices = leaf.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                leaf.block_until_ready()
            return


def hide_own_frames(error: Exception) -> None:
    """Takes the frames of this package out of the traceback.

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
