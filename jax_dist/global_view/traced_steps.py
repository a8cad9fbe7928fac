"""Trace of a step for one slice, and the leaves of its state that vary."""

import dataclasses
import itertools
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
    """The jaxpr of a step on one slice of each argument leaf, and what is known of its state."""

    call: MappedCall  # of types, its state `[N, *s]` as under pmap
    analysis: AxisAnalysis  # of the values in the jaxpr
    lifted: Lifted  # the jaxpr; captured arrays are its first inputs, then the slices
    out_tree: Any
    out_axes: tuple[Axis, ...]
    uniform_inputs: list[bool]  # whether each input of the jaxpr is the same on all devices
    state_of_arguments: list[StateLeaf | None]  # for each argument leaf: the state leaf that it is
    state_of_results: list[StateLeaf | None]  # for each result leaf: the one that it replaces

    @property
    def state_leaves(self) -> tuple[StateLeaf, ...]:
        return tuple(leaf for leaf in self.state_of_arguments if leaf is not None)


def trace_step(
    setting: Setting, call: MappedCall, state: list[StateType], varying: Varying
) -> TracedStep:
    """Trace a step for one slice, and find out which leaves of its state differ between devices.

    `call` has the types of the arguments, `[N, *s]` also of the state. `varying` has the paths of
    leaves that are known to differ, each with the line where it begins to.
    """
    lifted, out_tree, out_axes = _trace(setting, call)
    _check_equations(call.fun_name, lifted.jaxpr)
    # {1: 0} of `w, x -> loss, w`: result 1 is the new value of argument leaf 0, which is state.
    replaced_leaves = _pair_results(call, state, lifted.jaxpr, out_tree)
    paths, state_indices = call.paths(), {*replaced_leaves.values()}
    # The inputs of the jaxpr are the captured arrays, each the same on all devices ("uniform"), and
    # the argument leaves. One of the state is taken to be uniform until the step makes it vary.
    captured_count = len(lifted.captures)
    is_uniform = [True] * captured_count
    for index, axis in enumerate(call.axes):
        is_uniform_state = index in state_indices and paths[index] not in varying
        is_uniform.append(axis is None or is_uniform_state)
    pairs = [(captured_count + leaf, result) for result, leaf in replaced_leaves.items()]
    analysis = AxisAnalysis(setting.options.axis_name)
    is_uniform = analysis.settle_state(lifted.jaxpr, is_uniform, pairs)
    body = interpreter.open_jaxpr(lifted.jaxpr)
    facts = analysis.uniform_values(body, is_uniform)  # for each variable whether it is uniform
    # For each result that differs between devices: the line where it begins to.
    origins = {n: x for n, out in enumerate(body.outvars) if (x := find_origin(body, facts, out))}
    others = {n: origin for n, origin in origins.items() if n not in replaced_leaves}
    _check_results(call.fun_name, out_tree, out_axes, others)
    now_varying = {paths[leaf]: origins[n] for n, leaf in replaced_leaves.items() if n in origins}
    leaves = _leaves_of_state(setting, call, state, {**now_varying, **varying})
    arguments = [leaves.get(index) for index in range(len(call.leaves))]
    results = [leaves.get(replaced_leaves.get(n, -1)) for n in range(len(out_axes))]
    return TracedStep(call, analysis, lifted, out_tree, out_axes, is_uniform, arguments, results)


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
    # The new state is all results, or an element of them: the first that has its types.
    starts = itertools.accumulate((part.num_leaves for part in out_tree.children()), initial=0)
    candidates = [(out_tree, 0), *zip(out_tree.children(), starts, strict=False)]
    pairs: dict[int, int] = {}
    for kind in state:
        for structure, start in candidates:
            results = range(start, start + structure.num_leaves)
            types = jaxpr.out_avals[start : results.stop]
            if kind.fits(structure, types) and pairs.keys().isdisjoint(results):
                pairs.update(zip(results, leaf_indices(call, kind.argument), strict=True))
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
    """Return the leaves of the state, by index among all leaves of the call.

    One whose path is in `origins` differs between devices, so it cannot be sharded over them. If it
    should be, raise ArgumentError; or warn, if other leaves are sharded as asked for.
    """
    leaves: dict[int, StateLeaf] = {}
    for state_type in state:
        indices = leaf_indices(call, state_type.argument)
        leaves.update(zip(indices, setting.make_state_leaves(state_type, origins), strict=True))
    is_to_shard = lambda leaf: not find_sharded_axes(leaf.wanted.spec).isdisjoint(setting.mapped)
    unshardable = [leaf for leaf in leaves.values() if leaf.origin and is_to_shard(leaf)]
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


def leaf_indices(call: MappedCall, argument: int) -> list[int]:
    """Return the numbers of the leaves of an argument among those of the call."""
    return [number for number, owner in enumerate(call.owners) if owner == argument]
