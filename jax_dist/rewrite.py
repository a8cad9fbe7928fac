"""`rewrite` and `explain`."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_args

import jax
from jax.sharding import Mesh

from jax_dist import _codes, _compat
from jax_dist._compat import Device
from jax_dist._fast_path import Decorated
from jax_dist._hlo import ProgramCost
from jax_dist._passes import PassFinding
from jax_dist._passes.captures import Captures, find_captures
from jax_dist._passes.gathers import Gathers
from jax_dist._passes.partition import Partitioning, Specs
from jax_dist._pmap import axes
from jax_dist._rewrite.program import RewriteDispatcher, RewriteOptions
from jax_dist._rewrite.report import RewriteReport, find_gradient_sums, find_key_causes
from jax_dist.errors import ArgumentError, CapturedArrayWarning

if TYPE_CHECKING:
    from jax_dist.topology import Topology

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RewrittenFunction(Decorated[_P, _R]):
    """A rewritten function, called like the one that it was made from, its `__wrapped__`."""

    __slots__ = ("_dispatcher",)
    _kind = "jax_dist.rewrite"

    def __init__(self, fun: Callable[_P, _R], options: RewriteOptions):
        super().__init__(fun)  # jit(pmap(f)) has methods of the pmap in it
        self._dispatcher = RewriteDispatcher(fun, axes.function_name(fun), options)
        self._dispatcher.fast_path.attach(self)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the program for these arguments."""
        return self._dispatcher.lower(args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Return the rewritten jaxpr for these arguments."""
        return self._dispatcher.trace(args, kwargs)

    def report(self, /, *args: Any, **kwargs: Any) -> RewriteReport:
        """Report what the rewriting does for these arguments; compiles, and runs nothing."""
        known = self._dispatcher  # it would warn of nothing for a trace that jit has in its cache
        fresh = RewriteDispatcher(known.fun, known.name, known.options)
        return _report_of(fresh, args, kwargs)


def rewrite(
    fun: Callable[_P, _R],
    *,
    mesh: Mesh | None = None,
    captures: Captures = "lift",
    gathers: Gathers = "reduce",
    partitioning: Partitioning = "route",
    specs: Specs | None = None,
) -> RewrittenFunction[_P, _R]:
    """Return `fun` with known problems in its traced program rewritten.

    Put it outermost, around your `jax.jit` if there is one; it compiles by itself, and keeps the
    options of that jit: donation, shardings, static arguments. The passes, in this order: arrays
    that the function captures become arguments (JXD401); pmaps inside are moved onto the mesh
    (JXD002); custom_partitioning operations are routed through shard_map (JXD402); and gathers that
    are only reduced become reductions (JXD301). Code that cannot be shown to be sound is left
    unchanged; `explain` says which, and why.

    It is traced once per signature, as under jit; after that, a call is one C++ dispatch.

    Args:
      fun: a function, or a jit object. Its arguments are traced, but for the static ones of a jit.
      mesh: where pmaps go, each to the axis of its size, and where captured arrays are placed. By
        default pmaps keep the devices that they have.
      captures: what to do with captured arrays of 1 kB or more: "lift" them to arguments, and
        warn; "warn" only; "allow" them; or raise an "error". As under jit, they keep the values
        that they have when `fun` is traced. Random keys are lifted at any size, without a word.
      gathers: "reduce" them; only where the result is "exact", to the bit; or "keep" them.
      partitioning: "route" custom_partitioning operations through shard_map, or "keep" them.
      specs: how to shard such an operation, instead of the compiler's choice: `{name:
        (in_specs, out_specs)}`, as in `jax.shard_map`.

    Returns:
      The rewritten function, with `lower` and `trace` as jit objects have them, `report`, which
      takes arguments and says what was done, and `__wrapped__`, which is `fun`.

    Raises:
      ArgumentError: an argument has an unknown value. When called: `specs` does not fit, or there
        are captured arrays, and `captures` is "error".

    >>> import jax, jax.numpy as jnp
    >>> mean = jax.pmap(lambda x: jnp.mean(jax.lax.all_gather(x, "i")), axis_name="i")
    >>> step = rewrite(jax.jit(lambda x: mean(x) + 1.0))
    >>> step(jnp.arange(4.0)).tolist()
    [2.5, 2.5, 2.5, 2.5]
    >>> print(step.report(jnp.arange(4.0)).summary)
    1 rewritten, 1 noted; 12 B -> 6 B moved per step

    See jax-ml/jax#2926 on pmap in jit, and JEP 14273 on shard_map.
    """
    options = RewriteOptions(mesh, captures, gathers, partitioning, specs)
    _check(fun, options)
    return RewrittenFunction(fun, options)


def _check(fun: object, options: RewriteOptions) -> None:
    """Raise ArgumentError for an option of an unknown value."""
    if not callable(fun):
        raise ArgumentError(f"rewrite takes a function, not {fun!r}.")
    # By the name of an option: whether its value is valid, and what it must be.
    conditions = {"mesh": (isinstance(options.mesh, Mesh | None), "a jax.sharding.Mesh")}
    what_specs_are = "a dict {'name of the op': (in_specs, out_specs)}"
    conditions["specs"] = isinstance(options.specs, Mapping | None), what_specs_are
    for name, kind in dict(captures=Captures, gathers=Gathers, partitioning=Partitioning).items():
        values = get_args(kind)
        is_valid = getattr(options, name) in values
        conditions[name] = is_valid, f"one of {', '.join(map(repr, values))}"
    for name, (is_valid, expected) in conditions.items():
        if not is_valid:
            value = getattr(options, name)
            raise ArgumentError(f"{name}= of rewrite must be {expected}, not {value!r}.")


def explain(
    fun: Callable,
    *args: Any,
    mesh: Mesh | None = None,
    captures: Captures = "lift",
    gathers: Gathers = "reduce",
    partitioning: Partitioning = "route",
    specs: Specs | None = None,
    devices: "Topology | str | Sequence[Device] | None" = None,
    **kwargs: Any,
) -> RewriteReport:
    """Report what `rewrite` would do with a function, what not, and why; runs nothing.

    Args:
      fun: the function; see `rewrite`.
      *args: as in a call of `fun`; `jax.ShapeDtypeStruct` may stand in for arrays.
      mesh, captures, gathers, partitioning, specs: see `rewrite`.
      devices: of the machine that the report is for: what `jax_dist.topology` returns, its name, or
        a list. `fun` is then a mapped function, whose step every device runs with as much as here;
        and the report has its plan: what each strategy takes there, and whether that fits.
      **kwargs: as in a call of `fun`.

    Returns:
      The report: a table when printed, the same in a notebook, `to_dict()` for machines. It has
      what was rewritten and what was refused, by line; captured arrays; the collectives of the
      compiled program before and after, and their bytes; sizes and memory; whether the program has
      the same key in the persistent cache in every process; and the plan, if there are `devices`.

    Raises:
      ArgumentError: see `rewrite`.
      NotImplementedError: there are `devices`, and `fun` maps nothing.

    >>> import jax, jax.numpy as jnp
    >>> table = jnp.ones((100, 100))
    >>> explain(lambda x: x @ table, jnp.ones(100)).captured[0].name
    'table'
    """
    options: dict[str, Any] = dict(
        mesh=mesh, captures=captures, gathers=gathers, partitioning=partitioning, specs=specs
    )
    if devices is None:
        return rewrite(fun, **options).report(*args, **kwargs)
    # A rewriting does without the global view, which is among the strategies of a plan.
    from jax_dist._steps import MappedStep
    from jax_dist.plan import machines_of, plan

    (machine,) = machines_of(devices)
    step = MappedStep.find(fun, args, kwargs)
    there = rewrite(step.map_by(jax.pmap, machine.devices), **options)
    report = there.report(*step.leaves(len(machine.devices)))
    return dataclasses.replace(report, plan=plan(step, on=machine))


def _report_of(
    rewriting: RewriteDispatcher, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RewriteReport:
    """Compile the function of `rewriting`, which has traced nothing, as it is and rewritten."""
    fun, name = rewriting.fun, rewriting.name
    traced = _compat.jit_like(fun).trace(*args, **kwargs)
    before, cost_before, failure = None, ProgramCost(), ()
    try:
        lowered = traced.lower()
        before, cost_before = lowered, ProgramCost.measure(lowered)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        # Some programs only compile when they are rewritten.
        what = "the program does not compile as it is, so nothing is known of it"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        failure = (PassFinding(_codes.JIT_OF_PMAP, "noted", what, reason, ""),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CapturedArrayWarning)  # the report says it
        after = rewriting.lower(args, kwargs)
        program = rewriting.find_program(args, kwargs)
    # Those of one trace: in another, an array that is computed while tracing is another object.
    captured = program.trace.lifted.all_captures or find_captures(traced.jaxpr, fun)
    large = [capture for capture in captured if capture.is_worth_lifting]
    names_before = [capture.name for capture in large]
    names_after = [capture.name for capture in large if capture.action == "kept"]
    return RewriteReport(
        name=name,
        before=cost_before,
        after=ProgramCost.measure(after),
        cache_before=None if before is None else find_key_causes(before, names_before),
        cache_after=find_key_causes(after, names_after),
        findings=(*program.findings, *find_gradient_sums(traced.jaxpr), *failure),
        captured=captured,
    )
