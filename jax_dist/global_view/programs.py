"""The programs of a view: a step is planned and jitted for arguments of given types."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._passes.uniformity import find_sharded_axes
from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.call import MappedCall, type_of
from jax_dist._pmap.placement import put_as_jit_would, put_copy
from jax_dist.errors import ArgumentError, MappedAxisError
from jax_dist.global_view import placement
from jax_dist.global_view.emission import Emitter
from jax_dist.global_view.placement import Setting, StateType
from jax_dist.global_view.regions import BodyPlan, Planner
from jax_dist.global_view.report import GlobalViewReport, StateLeaf
from jax_dist.global_view.traced_steps import TracedStep, Varying, leaf_indices, trace_step


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """The plan of a step for one signature, and its jit object."""

    setting: Setting
    traced: TracedStep
    plan: BodyPlan

    @classmethod
    def build(
        cls, setting: Setting, call: MappedCall, state: list[StateType], varying: Varying
    ) -> "StepProgram":
        """Trace a step for the types in `call`, and plan which of its parts run in a shard_map."""
        traced = trace_step(setting, call, state, varying)
        result_specs = [  # None for results that are not of the state, or not sharded
            leaf.sharding.spec if leaf and leaf.uniform and leaf.is_sharded else None
            for leaf in traced.state_of_results
        ]
        # If nothing is sharded, the whole step is one shard_map, as under pmap.
        planner = Planner(traced.analysis, setting, single_region=not any(result_specs))
        plan = planner.plan(traced.lifted.jaxpr, traced.uniform_inputs, result_specs)
        return cls(setting, traced, plan)

    @functools.cached_property
    def argument_layouts(self) -> list[tuple[Axis, NamedSharding]]:
        """The mapped dimension of each argument leaf, None if it has none, and its sharding."""
        return list(map(self._layout, self.traced.state_of_arguments, self.traced.call.dims))

    @functools.cached_property
    def result_layouts(self) -> list[tuple[Axis, NamedSharding]]:
        """The mapped dimension of each result leaf, None if it has none, and its sharding."""
        return list(map(self._layout, self.traced.state_of_results, self.traced.out_axes))

    def _layout(self, leaf: StateLeaf | None, axis: Axis) -> tuple[Axis, NamedSharding]:
        """Return the mapped dimension and the sharding: of axis 1, `(1, P(None, "i"))`."""
        if leaf is not None:
            return None if leaf.uniform else 0, leaf.sharding  # `[*s]`, or `[N, *s]`
        spec = axes.spec_of_axis(axis, self.setting.mapped)
        return axis, NamedSharding(self.setting.axes.mesh, spec)

    @functools.cached_property
    def captured(self) -> tuple[jax.Array, ...]:
        """The captured arrays, on all devices: the first argument of the jit object."""
        mesh = self.setting.axes.mesh
        with jax.ensure_compile_time_eval():  # it outlives a trace around the first call
            return tuple(put_copy(x, NamedSharding(mesh, P())) for x in self.traced.lifted.values)

    @property
    def report(self) -> GlobalViewReport:
        regions = list(self.plan.regions())
        scattered = sum(len(region.scattered_sums) for region in regions)
        name, size = self.setting.options.fun_name, self.setting.axes.size
        return GlobalViewReport(name, size, self.traced.state_leaves, len(regions), scattered)

    @functools.cached_property
    def emitter(self) -> Emitter:
        """Emitter of the plan; XLA shards it over the model axes that the state uses."""
        axes, reorders_sums = self.setting.axes, self.setting.reorders_sums
        specs = [leaf.sharding.spec for leaf in self.traced.state_leaves]
        axes_of_state = frozenset().union(*map(find_sharded_axes, specs))
        model_axes = frozenset(axes.mesh.axis_names) - {*axes.mapped}  # as for tensor parallelism
        # To shard computations over model axes changes the order of sums.
        if reorders_sums and not axes_of_state.isdisjoint(model_axes):
            axes = dataclasses.replace(axes, model=model_axes)
        return Emitter(axes, reorders_sums)

    @functools.cached_property
    def jitted(self) -> Any:
        """The jit object of `step(captured, *args, kwargs)`, without static arguments."""
        options, mesh, out_tree = self.setting.options, self.setting.axes.mesh, self.traced.out_tree

        def step(captured: Sequence[Any], *args: Any) -> Any:
            return jax.tree.unflatten(out_tree, self._run(captured, jax.tree.leaves(args)))

        step.__name__ = step.__qualname__ = options.fun_name
        in_shardings = [sharding for _, sharding in self.argument_layouts]
        out_shardings = [sharding for _, sharding in self.result_layouts]
        static = options.static  # jit does not count these, but counts `captured`
        donated = [1 + n - sum(m < n for m in static) for n in options.donated if n not in static]
        return jax.jit(
            step,
            in_shardings=(NamedSharding(mesh, P()), *self._arguments(in_shardings)),
            out_shardings=jax.tree.unflatten(out_tree, out_shardings),
            donate_argnums=donated,
        )

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """Lower the step for such leaves; the captured arrays do not show as arguments."""
        pairs = zip(self.traced.state_of_arguments, leaves, strict=True)
        types = [leaf.whole if leaf else type_of(value) for leaf, value in pairs]
        lowered = self.jitted.lower(self.captured, *self._arguments(types))
        return _compat.pass_first_argument(lowered, self.captured)

    def run(self, call: MappedCall) -> Any:
        """Run the step on the leaves of a call, moved to the shardings of the program.

        Raises ArgumentError if the state is sharded otherwise, or a value is of this process alone.
        """
        placed = []
        for number, value in enumerate(call.leaves):
            state_leaf = self.traced.state_of_arguments[number]  # None for other arguments
            _, target = self.argument_layouts[number]
            is_single = state_leaf is not None and jnp.shape(value) == state_leaf.type.shape
            if state_leaf and not state_leaf.uniform and is_single:  # begin with equal values
                value = placement.stack_copies(value, target)
            elif not isinstance(value, Tracer):
                value = _move_to(value, target, state_leaf, lambda n=number: call.paths()[n])
            placed.append(value)
        return self.jitted(self.captured, *self._arguments(placed))

    def _arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves of a call as the arguments of the jit object."""
        args, kwargs = jax.tree.unflatten(self.traced.call.structure, leaves)
        return (*args, kwargs) if kwargs else args

    def _run(self, captured: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Return the result leaves of the step, by its plan, for which dimension 0 is mapped."""
        args = [*captured]
        for value, (mapped_dim, _) in zip(leaves, self.argument_layouts, strict=True):
            args.append(value if mapped_dim is None else jnp.moveaxis(value, mapped_dim, 0))
        results = self.emitter.run(self.plan, args)
        for number, (mapped_dim, _) in enumerate(self.result_layouts):
            if mapped_dim is None:
                continue
            if self.plan.uniform_results[number]:  # one `[*s]` for all devices
                results[number] = self.emitter.stack(results[number])
            results[number] = jnp.moveaxis(results[number], 0, mapped_dim)
        return results


class ViewPrograms:
    """The programs of one view, by the types of their arguments."""

    def __init__(self, fun: Callable, setting: Setting):
        self._fun, self._setting, self._size = fun, setting, setting.axes.size
        # By the types of a call. Calls that have the state as `[*s]` and `[N, *s]` share a program.
        self._programs_by_call: dict[Any, StepProgram] = {}
        self._programs_by_stacked_call: dict[Any, StepProgram] = {}  # with all state as `[N, *s]`
        # The paths of leaves that differ between devices in a program, and so in all of them.
        self._varying: dict[str, str] = {}  # with where they began to, "train.py:12 (add)"
        self._last_state_types: dict[tuple[int, Any], StateType] = {}  # by position and structure
        self.last: StepProgram | None = None

    def program_for(self, call: MappedCall) -> StepProgram:
        """Return the program for a call; state leaves are `[*s]`, or `[N, *s]` where they vary."""
        types = [type_of(leaf) for leaf in call.leaves]
        key = _key_of(call, types)
        program = self._programs_by_call.get(key) or self._find_or_build(call, types)
        self._programs_by_call[key] = self.last = program
        return program

    def _find_or_build(self, call: MappedCall, types: list[Any]) -> StepProgram:
        """Return the program for a call whose leaves have these types; build it if needed."""
        args, _ = call.rebuild(call.leaves)
        state = [self._type_of_state(number, args[number]) for number in self._setting.state]
        # A state may come as `[*s]` or, as under pmap, as `[N, *s]`: both have the same program.
        stacked_call = self._stack_state_types(call, types, state)
        key = _key_of(call, stacked_call.leaves)
        program = self._programs_by_stacked_call.get(key)
        # A program with one value of a leaf is of no use once the leaf differs between devices.
        leaves = program.traced.state_leaves if program else ()
        is_outdated = any(leaf.uniform and leaf.path in self._varying for leaf in leaves)
        if program is None or is_outdated:
            with meshes.context_of(AbstractMesh((), ())):  # the user's would be in the types
                program = StepProgram.build(self._setting, stacked_call, state, self._varying)
            self._programs_by_stacked_call[key] = program
        self._mark_varying({x.path: x.origin for x in program.traced.state_leaves if x.origin})
        is_explicit = {state_type.argument: state_type.is_explicit for state_type in state}
        for leaf, value in zip(program.traced.state_of_arguments, call.leaves, strict=True):
            if leaf is not None:
                self._check_shape(leaf, jnp.shape(value), is_explicit=is_explicit[leaf.argument])
        return program

    def _stack_state_types(
        self, call: MappedCall, types: list[Any], state: Sequence[StateType]
    ) -> MappedCall:
        """Return `call` with `types` as leaves, but `[N, *s]` for each leaf of the state."""
        types, leaf_axes = list(types), list(call.axes)
        for state_type in state:
            indices = leaf_indices(call, state_type.argument)  # among all leaves of the call
            for index, leaf in zip(indices, state_type.leaves, strict=True):
                types[index] = jax.ShapeDtypeStruct((self._size, *leaf.shape), leaf.dtype)
                leaf_axes[index] = 0
        stacked_call = dataclasses.replace(call, leaves=types, axes=tuple(leaf_axes))
        if stacked_call.size != self._size:
            raise MappedAxisError(
                f"'{call.fun_name}' is mapped over {self._size} devices, but its arguments have "
                f"{stacked_call.size} slices. Give [N, b, ...] for N devices, as place_batch makes "
                "it of rows."
            )
        return stacked_call

    def _mark_varying(self, origins: Varying) -> None:
        """Record leaves of the state, by path, that differ between devices in all programs now."""
        if not origins.keys() <= self._varying.keys():
            self._varying = {**origins, **self._varying}
            self._programs_by_call.clear()  # these may take the leaves to be the same on all

    def _type_of_state(self, number: int, state: Any, stacked: Any = None) -> StateType:
        """Return and record the types that argument `number`, a state, has on one device, `[*s]`.

        `stacked` says, for all leaves or as a tree, which are `[N, *s]`. If it is None, the types
        are those of the last state of this structure if it fits; else no leaf is stacked.
        """
        paths_and_leaves, structure = jax.tree.flatten_with_path(state)
        types = [type_of(leaf) for _, leaf in paths_and_leaves]
        last = self._last_state_types.get((number, structure))
        if stacked is None and last is not None and last.fits(structure, types, self._size):
            return last
        name = axes.argument_name(self._fun, number)
        paths = tuple(name + jax.tree_util.keystr(path) for path, _ in paths_and_leaves)
        is_stacked = axes.spread_prefix(stacked or False, state)
        leaves = tuple(map(self._type_on_one_device, paths, types, is_stacked))
        state_type = StateType(number, structure, paths, leaves, is_explicit=stacked is not None)
        if state_type != last:  # of another state, other leaves may vary
            self._varying = {p: x for p, x in self._varying.items() if p not in paths}
        self._last_state_types[number, structure] = state_type
        return state_type

    def _type_on_one_device(self, path: str, leaf: Any, stacked: Any) -> jax.ShapeDtypeStruct:
        """Return the type of a leaf without its first dimension, of devices, if it is stacked."""
        local_size = self._setting.axes.local_size  # the devices of this process
        if stacked and leaf.shape[:1] not in ((self._size,), (local_size,)):
            raise ArgumentError(
                f"The state is given as stacked over {local_size} devices, but {path} has "
                f"shape {tuple(leaf.shape)}. Give stacked=False for it, or stack it."
            )
        return jax.ShapeDtypeStruct(leaf.shape[1:] if stacked else leaf.shape, leaf.dtype)

    def register_state(self, number: int, state: Any, stacked: Any) -> StateType:
        """Return the types of argument `number`, a state; record which leaves differ by device."""
        state_type = self._type_of_state(number, state, stacked)
        self._programs_by_call.clear()  # they may take another leaf to be stacked
        values = jax.tree.leaves(state)
        for path, value, leaf in zip(state_type.paths, values, state_type.leaves, strict=True):
            if jnp.shape(value) == leaf.shape:  # it is not stacked: one value for all devices
                continue
            slices = placement.put_slices(value, self._setting.axes.by_device)
            if not placement.are_equal(slices):  # as of dropout keys
                self._mark_varying({path: "place (its copies differ)"})  # in place of a line
        return state_type

    def place_state(self, state_type: StateType, state: Any) -> Any:
        """Place an argument of the state on the mesh."""
        leaves = self._setting.make_state_leaves(state_type, self._varying)
        pairs = zip(jax.tree.leaves(state), leaves, strict=True)
        placed = [placement.place_leaf(value, leaf, self._setting.axes) for value, leaf in pairs]
        return jax.tree.unflatten(state_type.structure, placed)

    def known_program(self, what: str) -> StepProgram:
        """Return the last program, for its report."""
        if self.last is None:
            raise ArgumentError(f"Call the view before its {what}, or place(state, *arguments).")
        return self.last

    def types(self) -> Any:
        """Return the types of the state, with shardings; several arguments give a tuple."""
        traced = self.known_program("types").traced
        pairs = zip(traced.state_of_arguments, traced.call.leaves, strict=True)
        args, _ = traced.call.rebuild([leaf.whole if leaf else other for leaf, other in pairs])
        trees = tuple(args[number] for number in self._setting.state)
        return trees[0] if len(trees) == 1 else trees

    def _check_shape(self, leaf: StateLeaf, shape: tuple[int, ...], *, is_explicit: bool) -> None:
        """Raise ArgumentError if it is wrong or unclear that all devices share a state value."""
        is_single = shape == leaf.type.shape
        # On 8 devices, (8, 2) may be (2,) for each, or one for all: `stacked=` makes it explicit.
        if not (leaf.uniform or is_explicit) and is_single and shape[:1] == (self._size,):
            raise ArgumentError(
                f"{leaf.path} of shape {shape} begins to vary at {leaf.origin}: it may have one "
                f"value for each of {self._size} devices, or one for all. Say which, by "
                "view.place(state, *other arguments, stacked=...)."
            )
        if leaf.uniform and not is_single:
            raise ArgumentError(
                f"{leaf.path} has shape {tuple(shape)}, and the step keeps one value of it, of "
                f"shape {leaf.type.shape}. Place a state of pmap once, by "
                "state = view.place(state, stacked=True)."
            )


def _move_to(
    value: Any, target: NamedSharding, leaf: StateLeaf | None, path: Callable[[], str]
) -> Any:
    """Return an argument with the sharding `target`; ArgumentError if it must not be moved."""
    is_array = isinstance(value, jax.Array)
    is_global = is_array and not value.is_fully_addressable
    if not (is_global or target.is_fully_addressable or target.is_fully_replicated):
        raise ArgumentError(
            f"{path()} of shape {tuple(jnp.shape(value))} is of this process alone, and is to be "
            "sharded over all processes. Place it first, by view.place_batch(batch) or "
            "view.place(state)."
        )
    # jit itself places host arrays and uncommitted ones.
    if not is_array or not value.committed or value.sharding == target:
        return value
    if leaf and not value.sharding.is_equivalent_to(target, value.ndim):
        raise ArgumentError(
            f"{leaf.path} is sharded as {value.sharding}, and the global view keeps it as "
            f"{target}. Place the state once, by state = view.place(state)."
        )
    return put_as_jit_would(value, target)


def _key_of(call: MappedCall, types: Sequence[Any]) -> Hashable:
    """Return what a program depends on: structure, static arguments, and the types of leaves."""
    of_types = ((kind.shape, kind.dtype, kind.weak_type) for kind in types)
    return call.structure, call.static, *of_types
