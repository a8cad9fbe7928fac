"""Trace of a step for one slice, and the leaves of its state that vary."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jax_dist import _compat
from jax_dist._calls import warn_user
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Call
from jax_dist._rewrite import captures, interpreter
from jax_dist._rewrite.captures import Lifted
from jax_dist._rewrite.uniformity import cut_along
from jax_dist._usage import human_bytes
from jax_dist.errors import ArgumentError
from jax_dist.global_view.analysis import AxisAnalysis, VaryingOrigin
from jax_dist.global_view.placement import StateType, shardings_of
from jax_dist.global_view.report import Leaf
from jax_dist.global_view.setting import Setting


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TracedStep:
    """The jaxpr of a step on one slice, and what is known of its state.

    The inputs of the jaxpr are the captured arrays that are lifted, then a slice `[*s]` of each
    argument leaf.
    """

    structure: Any  # of the arguments that are not static
    lifted: Lifted
    out_tree: Any
    out_axes: tuple[Axis, ...]
    results: dict[int, int]  # of the state, by place among the result leaves: that of its argument
    ins: list[bool]  # whether each input of the jaxpr is uniform
    leaves: dict[int, Leaf]  # of the state, by place among the argument leaves

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return self.lifted.jaxpr


def trace_step(
    setting: Setting,
    analysis: AxisAnalysis,
    call: Call,
    state: dict[int, StateType],
    varying: Mapping[int, VaryingOrigin],
) -> TracedStep:
    """Trace a step for a call of types, its state `[N, *s]` as under pmap.

    `state` has the types of the state arguments on one device, by position; `varying` the argument
    leaves, by place, that are known to vary from the start.
    """
    lifted, out_tree, out_axes = _trace(setting, call)
    _check_equations(call.fun_name, lifted.jaxpr)
    results = _pair_results(call, state, lifted.jaxpr, out_tree)
    captured = len(lifted.captures)  # one object for all devices
    ins = [True] * captured
    for place, (owner, axis) in enumerate(zip(call.owners, call.axes, strict=True)):
        ins.append(axis is None or (owner in state and place not in varying))
    pairs = [(captured + place, result) for result, place in results.items()]
    ins = analysis.settle_state(lifted.jaxpr, ins, pairs)
    body = interpreter.open_jaxpr(lifted.jaxpr)
    uniform = analysis.uniform_values(body, ins)
    origins = [VaryingOrigin.of(body, uniform, out) for out in body.outvars]
    _check_results(call.fun_name, out_tree, out_axes, origins, results)
    of_state = {place: varying.get(place, origins[result]) for result, place in results.items()}
    leaves = _leaves_of_state(setting, call, state, of_state)
    return TracedStep(call.structure, lifted, out_tree, out_axes, results, ins, leaves)


def _trace(setting: Setting, call: Call) -> tuple[Lifted, Any, tuple[Axis, ...]]:
    """Trace the step for one slice; return its jaxpr, result structure and flat out_axes."""
    options = setting.options
    outputs: list[tuple[Any, tuple[Axis, ...]]] = []

    def body(*slices: jax.Array) -> list[Any]:
        output = call.run(slices)
        leaves, structure = jax.tree.flatten(output)
        out_axes = axes.spread_out_axes(options.out_axes, output, options.fun_name)
        outputs.append((structure, out_axes))
        return leaves

    body.__name__ = body.__qualname__ = options.fun_name
    body.__wrapped__ = call.fun  # pyright: ignore[reportFunctionMemberAccess]  # JAX names its line
    with captures.tracing(options.captures):
        jaxpr = jax.make_jaxpr(body, axis_env=[(options.axis_name, call.size)])(*call.slices())
    lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
    return lifted, *outputs[-1]


_UNSUPPORTED = {
    "shard_map": "maps another function. Map once, over a mesh of all devices, or keep "
    "jax_dist.pmap for this step.",
    "sharding_constraint": "calls with_sharding_constraint. Remove it, and say by shardings= how "
    "the state is sharded: what is computed with it is sharded, too.",
}


def _check_equations(fun_name: str, jaxpr: Any, around: tuple[JaxprEqn, ...] = ()) -> None:
    """Raise NotImplementedError for a primitive of `_UNSUPPORTED`; `around` are outer equations."""
    for eqn in interpreter.open_jaxpr(jaxpr).eqns:
        reason = _UNSUPPORTED.get(_compat.name_of(eqn))
        if reason is not None:
            line = interpreter.user_line_of(eqn, around) or "an unknown line"
            raise NotImplementedError(f"global_view of '{fun_name}': the step, at {line}, {reason}")
        for body in interpreter.bodies(eqn):
            _check_equations(fun_name, body, (*around, eqn))


def _pair_results(
    call: Call, state: dict[int, StateType], jaxpr: ClosedJaxpr, out_tree: Any
) -> dict[int, int]:
    """Return, by place of a result leaf, the place of the state leaf that it replaces."""
    numbers = jax.tree.unflatten(out_tree, range(len(jaxpr.out_avals)))
    parts = [numbers, *numbers] if isinstance(numbers, tuple | list) else [numbers]
    pairs: dict[int, int] = {}
    for argument, kind in state.items():
        for part in parts:
            outs = jax.tree.leaves(part)
            types = [(jaxpr.out_avals[n].shape, jaxpr.out_avals[n].dtype) for n in outs]
            is_state = jax.tree.structure(part) == kind.structure and types == [
                (leaf.shape, leaf.dtype) for leaf in kind.leaves
            ]
            if is_state and pairs.keys().isdisjoint(outs):
                pairs.update(zip(outs, places_of(call, argument), strict=True))
                break
        else:
            name = axes.argument_name(call.fun, argument)
            raise ArgumentError(
                f"'{call.fun_name}' gives no new state: no result has the structure, shapes and "
                f"dtypes of argument '{name}'. Give the position of the carried argument by "
                "state=; None if there is none."
            )
    return pairs


def _check_results(
    fun_name: str,
    out_tree: Any,
    out_axes: Sequence[Axis],
    origins: Sequence[VaryingOrigin | None],
    state: Collection[int],
) -> None:
    """Raise ArgumentError for a result that varies and has out_axes=None."""
    paths = jax.tree.leaves_with_path(jax.tree.unflatten(out_tree, out_tree.num_leaves * [0]))
    for place, (axis, origin) in enumerate(zip(out_axes, origins, strict=True)):
        if axis is None and origin is not None and place not in state:
            raise ArgumentError(
                f"The result{jax.tree_util.keystr(paths[place][0])} of '{fun_name}' has "
                f"out_axes=None, but it begins to vary at {origin}. Average it over devices "
                "(jax.lax.pmean), or give out_axes=0 for it."
            )


def _leaves_of_state(
    setting: Setting,
    call: Call,
    state: dict[int, StateType],
    origins: dict[int, VaryingOrigin | None],
) -> dict[int, Leaf]:
    paths = call.paths()
    leaves: dict[int, Leaf] = {}
    unsharded: list[Leaf] = []  # which were to be sharded over the mapped axis
    for argument, kind in state.items():
        shardings = shardings_of(setting.shardings, setting.by_device, kind)
        places = places_of(call, argument)
        for place, leaf_type, sharding in zip(places, kind.leaves, shardings, strict=True):
            origin, spec = origins[place], sharding.spec
            if origin is not None:
                sharding = setting.sharding_of_varying(spec)
            leaves[place] = Leaf(argument, paths[place], leaf_type, sharding, setting.size, origin)
            if origin is not None and not cut_along(spec).isdisjoint(setting.mesh_axes):
                unsharded.append(leaves[place])
    if unsharded:
        is_any_sharded = any(leaf.uniform and leaf.is_sharded for leaf in leaves.values())
        _reject_unsharded(setting, unsharded, is_any_sharded=is_any_sharded)
    return leaves


def _reject_unsharded(setting: Setting, leaves: list[Leaf], *, is_any_sharded: bool) -> None:
    """Raise ArgumentError, or warn, of leaves that vary and were to be sharded."""
    lines = "; ".join(
        f"{leaf.path}, {human_bytes(leaf.bytes_per_device)} per device, begins to vary at "
        f"{leaf.origin}"
        for leaf in leaves
    )
    text = (
        f"Leaves of the state of '{setting.options.fun_name}' cannot be sharded, for each device "
        f"has others: {lines}. Average them, or their gradients, over devices (jax.lax.pmean) "
        "before that line, or let shardings= be a function that gives PartitionSpec() for them."
    )
    if callable(setting.shardings) or not is_any_sharded:
        raise ArgumentError(text)
    warn_user(text, UserWarning)


def places_of(call: Call, argument: int) -> list[int]:
    """Return the places of the leaves of an argument among those of the call."""
    return [place for place, owner in enumerate(call.owners) if owner == argument]
