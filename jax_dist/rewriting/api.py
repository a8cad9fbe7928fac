"""`rewrite` and `explain`.

For a report both programs, as it was and rewritten, are compiled and measured, and nothing is run.
"""

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, get_args

import jax
from jax.sharding import Mesh

from jax_dist import _codes, _compat, errors
from jax_dist.errors import CapturedArrayWarning, RewriteError, UnsupportedError
from jax_dist.passes.captures import Capture, Captures, Policy, find_captures
from jax_dist.passes.gathers import Gathers
from jax_dist.passes.hazards import find_doubled_sums, find_noise
from jax_dist.passes.pipeline import PassFinding
from jax_dist.rewriting import alternatives
from jax_dist.rewriting.alternatives import Comparison
from jax_dist.rewriting.cost import ProgramCost, program_of
from jax_dist.rewriting.program import Partitioning, RewrittenProgram, Specs, Wishes
from jax_dist.rewriting.report import CacheVerdict, CapturedArray, Report, verdict_of


class Rewritten(Protocol):
    """A rewritten function: called like the one it was made from, which is its `__wrapped__`."""

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
    """The same function, without what makes its program wrong, slow or impossible to cache.

    Put it outermost, around your `jax.jit` if there is one; it compiles by itself, and keeps the
    options of that jit: donation, shardings, static arguments. The passes, in this order: arrays
    that the function captures become arguments (JXD401); pmaps inside are moved onto the mesh, and
    loops around them into the mapped region (JXD002); custom_partitioning operations are routed
    through shard_map (JXD402); and gathers that are only reduced become reductions (JXD301). Code
    that cannot be shown to be sound is left unchanged; `explain` says which, and why.

    It is traced once per signature, as under jit; after that, a call is one C++ dispatch. A donated
    state that has no explicit placement is sharded before the first call as the program will
    return it, so a training loop compiles once.

    Args:
      fun: a function, or a jit object. Its arguments are traced, but for the static ones of a jit.
      mesh: where pmaps go, each to the axis of its size, and where captured arrays are placed. By
        default pmaps keep the devices that they have.
      captures: what to do with captured arrays: "lift" them to arguments, and warn; "warn" only;
        "allow" them; or raise an "error".
      gathers: "reduce" them; only where the result is "exact", to the bit; or "keep" them.
      partitioning: "route" custom_partitioning operations through shard_map, or "keep" them.
      specs: how to shard such an operation, instead of the compiler's choice: `{name:
        (in_specs, out_specs)}`, as in `jax.shard_map`.
      live_captures: follow the objects that are captured, instead of keeping the values that they
        had when traced, as jit does.
      warn_bytes: warn of captured arrays from this size on, in bytes.
      lift_bytes: lift captured arrays from this size on, in bytes; random keys always.

    Returns:
      The rewritten function, with `lower` and `trace` as jit objects have them, `report`, which
      takes arguments and says what was done, and `__wrapped__`, which is `fun`.

    Raises:
      RewriteError: an argument has an unknown value. When called: `specs` does not fit.
      CapturedArrayError: when called, there are captured arrays, and `captures` is "error".
      UnsupportedError: this jax is older than 0.10.

    >>> import jax, jax.numpy as jnp
    >>> mean = jax.pmap(lambda x: jnp.mean(jax.lax.all_gather(x, "i")), axis_name="i")
    >>> step = rewrite(jax.jit(lambda x: mean(x) + 1.0))
    >>> step(jnp.arange(4.0)).tolist()
    [2.5, 2.5, 2.5, 2.5]
    >>> print(step.report(jnp.arange(4.0)).summary)
    1 rewritten, 1 noted; 12 B -> 6 B moved per step

    See jax-ml/jax#2926 on pmap in jit, and JEP 14273 on shard_map.
    """
    wishes = _checked(
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
    return _Function(fun, RewrittenProgram(fun, _name_of(fun), wishes))


def _checked(
    fun: object,
    *,
    mesh: Mesh | None,
    captures: Captures,
    gathers: Gathers,
    partitioning: Partitioning,
    specs: Specs | None,
    live_captures: bool,
    warn_bytes: int,
    lift_bytes: int,
) -> Wishes:
    """The wishes; raises RewriteError for what is none."""
    if not callable(fun):
        raise _wrong("fun", fun, "it is called to be traced", "Give a function.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise _wrong("mesh", mesh, "pmaps are moved onto its devices", "Give a jax.sharding.Mesh.")
    for name, value, kind in (
        ("captures", captures, Captures),
        ("gathers", gathers, Gathers),
        ("partitioning", partitioning, Partitioning),
    ):
        if value not in get_args(kind):
            spelled = ", ".join(map(repr, get_args(kind)))
            raise _wrong(name, value, "it is none of the choices", f"Choose one of {spelled}.")
    for name, count in (("warn_bytes", warn_bytes), ("lift_bytes", lift_bytes)):
        if not isinstance(count, int) or count < 0:
            raise _wrong(name, count, "it is a size in bytes", "Give an integer, 0 or more.")
    if specs is not None and not isinstance(specs, Mapping):
        raise _wrong(
            "specs",
            specs,
            "it says how to cut which operation",
            "Give {'name of the op': (in_specs, out_specs)}.",
        )
    if live_captures and captures != "lift":
        raise _wrong(
            "live_captures",
            live_captures,
            f"captures={captures!r} leaves arrays in the program",
            "Say captures='lift' too, or leave live_captures out.",
        )
    policy = Policy(captures, warn_bytes, lift_bytes, live_captures)
    return Wishes(mesh, policy, gathers, partitioning, specs)


def _wrong(name: str, value: object, why: str, do: str) -> RewriteError:
    return RewriteError(
        errors.message(
            what=f"rewrite got a wrong `{name}`",
            which=[f"{name} is {value!r}"],
            why=why,
            do=do,
        )
    )


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
    """Reports what `rewrite` would do with a function, what not, and why; runs nothing.

    Args:
      fun: the function; see `rewrite`, also for the other keyword arguments.
      *args: as in a call of `fun`; `jax.ShapeDtypeStruct` may stand in for arrays.
      mesh: see `rewrite`.
      captures: see `rewrite`.
      gathers: see `rewrite`.
      partitioning: see `rewrite`.
      specs: see `rewrite`.
      **kwargs: as in a call of `fun`.

    Returns:
      The report: a table when printed, the same in a notebook, `to_dict()` for machines. It has
      what was rewritten and what was refused, by line; captured arrays; the collectives of the
      compiled program before and after, and their bytes; sizes and memory; whether the program has
      the same key in the persistent cache in every process; for a function with pmaps, whether pmap
      or shard_map moves less; and, for a mapped step that returns its state, the memory of each
      device when `global_view` shards that state.

    Raises:
      RewriteError: see `rewrite`.

    >>> import jax, jax.numpy as jnp
    >>> table = jnp.ones((100, 100))
    >>> explain(lambda x: x @ table, jnp.ones(100)).captured[0].name
    'table'
    """
    rewritten = rewrite(
        fun,
        mesh=mesh,
        captures=captures,
        gathers=gathers,
        partitioning=partitioning,
        specs=specs,
    )
    return rewritten.report(*args, **kwargs)


class _Function:
    """What the user calls. The call stands in a slot, as that of `mapping.pmap.Mapped` does."""

    __slots__ = (
        "__call__",
        "__dict__",
        "__name__",
        "__qualname__",
        "__weakref__",
        "__wrapped__",
        "_program",
    )
    if TYPE_CHECKING:

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __init__(self, fun: Callable, program: RewrittenProgram):
        own = getattr(fun, "__dict__", {})  # jit(pmap(f)) has methods of the pmap in it
        self.__dict__.update({key: own[key] for key in own if not hasattr(_Function, key)})
        for name in ("__module__", "__doc__", "__annotations__"):
            self.__dict__[name] = getattr(fun, name, None)
        self.__name__ = getattr(fun, "__name__", type(fun).__name__)
        self.__qualname__ = getattr(fun, "__qualname__", self.__name__)
        self.__wrapped__, self._program = fun, program
        program.serve(self)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Methods can be rewritten, too."""
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._program.lower(args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._program.trace(args, kwargs)

    def report(self, /, *args: Any, **kwargs: Any) -> Report:
        return _report_of(self._program.again(), args, kwargs)


def _name_of(fun: Any) -> str:
    """A name without an address in it, for it is part of the program and of its cache key."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def _report_of(
    rewriting: RewrittenProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Report:
    """What a rewriting, which has traced nothing yet, does on these arguments."""
    fun, name, wishes = rewriting.fun, rewriting.name, rewriting.wishes
    traced = _compat.jit_like(fun).trace(*args, **kwargs)
    before = _as_given(traced)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapturedArrayWarning)  # the report says it
        after = rewriting.lower(args, kwargs)
    # Of one trace: what each derives again, as in `table * 2`, is another array then.
    captured = rewriting.found or find_captures(traced.jaxpr, fun)
    lifted = {capture.key for capture in rewriting.lifted}
    kept = [capture for capture in captured if capture.key not in lifted]
    program_after = program_of(after)
    return Report(
        name=name,
        before=before.program,
        after=program_after,
        cache_before=_verdict_before(before, _large(captured, wishes)),
        cache_after=verdict_of(after, _large(kept, wishes)),
        findings=(
            *rewriting.findings,
            *find_doubled_sums(traced.jaxpr),  # left to the user
            *find_noise(traced.jaxpr),
            *before.failure,
        ),
        captured=tuple(_row(capture, lifted) for capture in captured),
        compare=_comparison(rewriting, traced, (args, kwargs), before, program_after),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _AsGiven:
    """The program as it is."""

    lowered: jax.stages.Lowered | None  # None: it does not compile
    program: ProgramCost
    failure: tuple[PassFinding, ...]


def _as_given(traced: jax.stages.Traced) -> _AsGiven:
    """Also of a program that only compiles when it is rewritten."""
    try:
        lowered = traced.lower()
        return _AsGiven(lowered, program_of(lowered), ())
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        what = "the program as it is does not compile: before, all is unknown"
        return _AsGiven(
            None, ProgramCost(), (PassFinding(_codes.JIT_OF_PMAP, "noted", what, reason, ""),)
        )


def _verdict_before(before: _AsGiven, captured: Sequence[str]) -> CacheVerdict:
    if before.lowered is None:
        return CacheVerdict(stable=False, causes=("It does not compile.",))
    return verdict_of(before.lowered, captured)


def _comparison(
    rewriting: RewrittenProgram,
    traced: jax.stages.Traced,
    arguments: tuple[tuple, dict],
    before: _AsGiven,
    after: ProgramCost,
) -> Comparison | None:
    """None also with several processes, where the program as it is may compute something else."""
    if before.lowered is None or jax.process_count() > 1:
        return None
    programs = (before.program, after)
    return alternatives.compare(traced, rewriting.fun, rewriting.name, arguments, programs)


def _large(captured: Sequence[Capture], wishes: Wishes) -> list[str]:
    least = wishes.policy.warn_bytes
    return [capture.name for capture in captured if capture.bytes >= least or capture.is_key]


def _row(capture: Capture, lifted: set) -> CapturedArray:
    return CapturedArray(
        name=capture.name,
        shape=capture.shape,
        dtype=capture.dtype,
        bytes=capture.bytes,
        captured_at=capture.captured_at,
        used_at=capture.used_at,
        action="lifted" if capture.key in lifted else "kept",
    )
