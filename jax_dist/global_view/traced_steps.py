"""Trace of a step for one slice, and the leaves of its state that vary."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jax_dist import _compat
from jax_dist._calls import warn_user
from jax_dist._passes import captures, interpreter
from jax_dist._passes.captures import Lifted
from jax_dist._passes.uniformity import find_sharded_axes
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.call import MappedCall
from jax_dist._usage import human_bytes
from jax_dist.errors import ArgumentError
from jax_dist.global_view.analysis import AxisAnalysis, find_origin
from jax_dist.global_view.placement import Setting, StateType
from jax_dist.global_view.report import StateLeaf

Varying: TypeAlias = Mapping[str, str]  # where leaves of the state begin to vary, by path


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TracedStep:
    """The jaxpr of a step on one slice, and what is known of its state.

    The inputs of the jaxpr are the captured arrays that are lifted, then a slice `[*s]` of each
    argument leaf.
    """

    call: MappedCall  # of types, its state `[N, *s]` as under pmap
    analysis: AxisAnalysis  # of the values in the jaxpr
    lifted: Lifted
    out_tree: Any
    out_axes: tuple[Axis, ...]
    ins: list[bool]  # whether each input of the jaxpr is uniform
    in_leaves: list[StateLeaf | None]  # for each argument leaf, that of the state, if it is one
    out_leaves: list[StateLeaf | None]  # for each result leaf, that of the state which it replaces

    @property
    def state_leaves(self) -> tuple[StateLeaf, ...]:
        return tuple(leaf for leaf in self.in_leaves if leaf is not None)


def trace_step(
    setting: Setting, call: MappedCall, state: list[StateType], varying: Varying
) -> TracedStep:
    """Trace a step for one slice, and find out which leaves of its state differ between devices.

    `call` has types, of the state `[N, *s]`; `varying` has the leaves that are known to differ.
    """
    lifted, out_tree, out_axes = _trace(setting, call)
    _check_equations(call.fun_name, lifted.jaxpr)
    state_leaf_of = _pair_results(call, state, lifted.jaxpr, out_tree)  # by number of the result
    paths, state_numbers = call.paths(), {*state_leaf_of.values()}
    ins = [True] * len(lifted.captures)  # a captured array is one object for all devices
    for number, axis in enumerate(call.axes):
        # A leaf of the state is taken to be uniform until the step is seen to make it vary.
        is_uniform_state = number in state_numbers and paths[number] not in varying
        ins.append(axis is None or is_uniform_state)
    pairs = [(len(lifted.captures) + leaf, result) for result, leaf in state_leaf_of.items()]
    analysis = AxisAnalysis(setting.options.axis_name)
    ins = analysis.settle_state(lifted.jaxpr, ins, pairs)
    body = interpreter.open_jaxpr(lifted.jaxpr)
    uniform_values = analysis.uniform_values(body, ins)
    origins = [find_origin(body, uniform_values, out) for out in body.outvars]  # None: uniform
    others = {n: origin for n, origin in enumerate(origins) if origin and n not in state_leaf_of}
    _check_results(call.fun_name, out_tree, out_axes, others)
    now_varying = {paths[leaf]: x for out, leaf in state_leaf_of.items() if (x := origins[out])}
    leaves = _leaves_of_state(setting, call, state, {**now_varying, **varying})
    in_leaves = [leaves.get(number) for number in range(len(call.leaves))]
    out_leaves = [leaves.get(state_leaf_of.get(n, -1)) for n in range(len(out_axes))]
    return TracedStep(call, analysis, lifted, out_tree, out_axes, ins, in_leaves, out_leaves)


def _trace(setting: Setting, call: MappedCall) -> tuple[Lifted, Any, tuple[Axis, ...]]:
    """Trace the step for one slice; return its jaxpr, result structure and flat out_axes."""
    options = setting.options

    def body(*slices: jax.Array) -> Any:
        return call.run(slices)

    body.__name__ = body.__qualname__ = options.fun_name
    body.__wrapped__ = call.fun  # pyright: ignore[reportFunctionMemberAccess]  # JAX names its line
    with captures.tracing(options.captures):
        axis_env = [(options.axis_name, call.size)]
        trace = jax.make_jaxpr(body, axis_env=axis_env, return_shape=True)
        jaxpr, output = trace(*call.slices())
    out_axes = axes.spread_out_axes(options.out_axes, output, options.fun_name)
    lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
    return lifted, jax.tree.structure(output), out_axes


_UNSUPPORTED = {
    "shard_map": "maps another function. Map once, over a mesh of all devices, or keep "
    "jax_dist.pmap for this step.",
    "sharding_constraint": "calls with_sharding_constraint. Remove it, and say by shardings= how "
    "the state is sharded: what is computed with it is sharded, too.",
}


def _check_equations(fun_name: str, jaxpr: Any, around: tuple[JaxprEqn, ...] = ()) -> None:
    """Raise NotImplementedError for a primitive of `_UNSUPPORTED`; `around` are outer equations."""
    for eqn in interpreter.open_jaxpr(jaxpr).eqns:
        if reason := _UNSUPPORTED.get(_compat.name_of(eqn)):
            line = interpreter.user_line_of(eqn, around) or "an unknown line"
            raise NotImplementedError(f"global_view of '{fun_name}': the step, at {line}, {reason}")
        for body in interpreter.bodies(eqn):
            _check_equations(fun_name, body, (*around, eqn))


def _pair_results(
    call: MappedCall, state: Sequence[StateType], jaxpr: ClosedJaxpr, out_tree: Any
) -> dict[int, int]:
    """Return by result number the state leaf that it replaces: `{1: 0}` of `w, x -> loss, w`."""
    numbers = jax.tree.unflatten(out_tree, range(len(jaxpr.out_avals)))
    # The new state is all results, or an element of them: the first that has its types.
    candidates = [numbers, *numbers] if isinstance(numbers, tuple | list) else [numbers]
    pairs: dict[int, int] = {}
    for kind in state:
        for candidate in candidates:
            results, structure = jax.tree.flatten(candidate)
            types = [jaxpr.out_avals[n] for n in results]
            if kind.fits(structure, types) and pairs.keys().isdisjoint(results):
                pairs.update(zip(results, leaf_numbers(call, kind.argument), strict=True))
                break
        else:
            name = axes.argument_name(call.fun, kind.argument)
            raise ArgumentError(
                f"'{call.fun_name}' gives no new state: no result has the structure, shapes and "
                f"dtypes of argument '{name}'. Give the position of the carried argument by "
                "state=; None if there is none."
            )
    return pairs


def _check_results(
    fun_name: str, out_tree: Any, out_axes: Sequence[Axis], origins: Mapping[int, str]
) -> None:
    """Raise ArgumentError for a result in `origins`, which varies, that has out_axes=None."""
    paths = jax.tree.leaves_with_path(jax.tree.unflatten(out_tree, out_tree.num_leaves * [0]))
    for number, origin in origins.items():
        if out_axes[number] is None:
            raise ArgumentError(
                f"The result{jax.tree_util.keystr(paths[number][0])} of '{fun_name}' has "
                f"out_axes=None, but it begins to vary at {origin}. Average it over devices "
                "(jax.lax.pmean), or give out_axes=0 for it."
            )


def _leaves_of_state(
    setting: Setting, call: MappedCall, state: Sequence[StateType], origins: Varying
) -> dict[int, StateLeaf]:
    """Return the leaves of the state, by number among all leaves of the call.

    One that varies (see `origins`) cannot be sharded: an error, or a warning if others can.
    """
    leaves: dict[int, StateLeaf] = {}
    for kind in state:
        numbers = leaf_numbers(call, kind.argument)
        leaves.update(zip(numbers, setting.leaves_of(kind, origins), strict=True))
    is_to_shard = lambda leaf: not find_sharded_axes(leaf.wanted.spec).isdisjoint(setting.mapped)
    unshardable = [leaf for leaf in leaves.values() if not leaf.uniform and is_to_shard(leaf)]
    if not unshardable:
        return leaves
    lines = "; ".join(
        f"{leaf.path}, {human_bytes(leaf.bytes_per_device)} per device, begins to vary at "
        f"{leaf.origin}"
        for leaf in unshardable
    )
    text = (
        f"Leaves of the state of '{call.fun_name}' cannot be sharded, for each device has others: "
        f"{lines}. Average them, or their gradients, over devices (jax.lax.pmean) before that "
        "line, or let shardings= be a function that gives PartitionSpec() for them."
    )
    is_any_sharded = any(leaf.uniform and leaf.is_sharded for leaf in leaves.values())
    # A function names the leaves to shard, so one that it cannot have is an error.
    if callable(setting.shardings) or not is_any_sharded:
        raise ArgumentError(text)
    warn_user(text, UserWarning)
    return leaves


def leaf_numbers(call: MappedCall, argument: int) -> list[int]:
    """Return the numbers of the leaves of an argument among those of the call."""
    return [number for number, owner in enumerate(call.owners) if owner == argument]
