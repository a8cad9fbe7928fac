"""The programs of a view: a step is planned and jitted for arguments of given types.

Which leaves of its state vary is known for all programs of a view.
"""

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
from jax_dist.global_view.traced_steps import TracedStep, Varying, leaf_numbers, trace_step


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
        """Trace a step for arguments of these types, and plan which parts run in a shard_map."""
        traced = trace_step(setting, call, state, varying)
        result_specs = [  # of the new state, where it is sharded
            leaf.sharding.spec if leaf and leaf.uniform and leaf.is_sharded else None
            for leaf in traced.out_leaves
        ]
        # If nothing is sharded, the whole step is one shard_map, as under pmap.
        planner = Planner(traced.analysis, setting, single_region=not any(result_specs))
        return cls(setting, traced, planner.plan(traced.lifted.jaxpr, traced.ins, result_specs))

    @functools.cached_property
    def in_layouts(self) -> list[tuple[Axis, NamedSharding]]:
        """The mapped dimension of each argument leaf, None if it has none, and its sharding."""
        return list(map(self._layout, self.traced.in_leaves, self.traced.call.dims))

    @functools.cached_property
    def out_layouts(self) -> list[tuple[Axis, NamedSharding]]:
        """The mapped dimension of each result leaf, None if it has none, and its sharding."""
        return list(map(self._layout, self.traced.out_leaves, self.traced.out_axes))

    def _layout(self, leaf: StateLeaf | None, axis: Axis) -> tuple[Axis, NamedSharding]:
        """Return the mapped dimension and the sharding: of axis 1, `(1, P(None, "i"))`."""
        if leaf is not None:
            return None if leaf.uniform else 0, leaf.sharding  # `[*s]`, or `[N, *s]`
        spec = axes.spec_of_axis(axis, self.setting.mapped)
        return axis, NamedSharding(self.setting.axes.mesh, spec)

    @functools.cached_property
    def captured(self) -> tuple[jax.Array, ...]:
        """The captured arrays, on all devices: the first argument of the jit object."""
        replicated = NamedSharding(self.setting.axes.mesh, P())
        with jax.ensure_compile_time_eval():  # it outlives a trace around the first call
            return tuple(put_copy(value, replicated) for value in self.traced.lifted.values)

    @property
    def report(self) -> GlobalViewReport:
        regions = list(self.plan.regions())
        scattered = sum(len(region.scatters) for region in regions)
        name, size = self.setting.options.fun_name, self.setting.axes.size
        return GlobalViewReport(name, size, self.traced.state_leaves, len(regions), scattered)

    @functools.cached_property
    def emitter(self) -> Emitter:
        """Emitter of the plan; XLA shards regions over the model axes that the state uses."""
        axes, reorders = self.setting.axes, self.setting.reorders
        specs = [leaf.sharding.spec for leaf in self.traced.state_leaves]
        axes_of_state = frozenset().union(*map(find_sharded_axes, specs))
        model_axes = frozenset(axes.mesh.axis_names) - {*axes.mapped}
        # To shard computations over model axes changes the order of sums.
        if reorders and not axes_of_state.isdisjoint(model_axes):
            axes = dataclasses.replace(axes, model=model_axes)
        return Emitter(axes, reorders)

    @functools.cached_property
    def jitted(self) -> Any:
        """The jit object of `step(captured, *args, kwargs)`, without static arguments."""
        options, out_tree = self.setting.options, self.traced.out_tree

        def step(captured: Sequence[Any], *args: Any) -> Any:
            return jax.tree.unflatten(out_tree, self._run(captured, jax.tree.leaves(args)))

        step.__name__ = step.__qualname__ = options.fun_name
        static = options.static
        # Numbered without the static arguments.
        donated = [n - sum(m < n for m in static) for n in options.donated if n not in static]
        in_shardings = [sharding for _, sharding in self.in_layouts]
        out_shardings = [sharding for _, sharding in self.out_layouts]
        replicated = NamedSharding(self.setting.axes.mesh, P())
        return jax.jit(
            step,
            in_shardings=(replicated, *self._arguments(in_shardings)),
            out_shardings=jax.tree.unflatten(out_tree, out_shardings),
            donate_argnums=[1 + number for number in donated],  # after the captured arrays
        )

    def call(self, leaves: Sequence[Any]) -> Any:
        """Run the step for leaves that are placed."""
        return self.jitted(self.captured, *self._arguments(leaves))

    def lower(self, leaves: Sequence[Any]) -> jax.stages.Lowered:
        """Lower the step for such leaves; the captured arrays do not show as arguments."""
        pairs = zip(self.traced.in_leaves, leaves, strict=True)
        types = [leaf.whole if leaf else type_of(value) for leaf, value in pairs]
        lowered = self.jitted.lower(self.captured, *self._arguments(types))
        return _compat.pass_first_argument(lowered, self.captured)

    def place(self, call: MappedCall) -> list[Any]:
        """Return the leaves of a call with the shardings of the program.

        Raises ArgumentError if the state is sharded otherwise, or a value is of this process alone.
        """
        placed = []
        for number, value in enumerate(call.leaves):
            leaf, (_, target) = self.traced.in_leaves[number], self.in_layouts[number]
            is_single = leaf is not None and jnp.shape(value) == leaf.type.shape
            if leaf and not leaf.uniform and is_single:  # each device begins with a copy of it
                value = placement.copy_to_devices(value, target)
            elif not isinstance(value, Tracer):
                value = _move_to(value, target, leaf, lambda n=number: call.paths()[n])
            placed.append(value)
        return placed

    def _arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves of a call as the arguments of the jit object."""
        args, kwargs = jax.tree.unflatten(self.traced.call.structure, leaves)
        return (*args, kwargs) if kwargs else args

    def _run(self, captured: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Run the plan on traced captures and argument leaves; return results moved to out_axes."""
        args = [*captured]
        for value, (axis, _) in zip(leaves, self.in_layouts, strict=True):
            args.append(value if axis is None else jnp.moveaxis(value, axis, 0))
        results = self.emitter.run(self.plan, args)
        for number, (axis, _) in enumerate(self.out_layouts):
            if axis is None:
                continue
            if self.plan.uniform_outs[number]:  # uniform, and asked for as `[N, *s]`
                results[number] = self.emitter.stack(results[number])
            results[number] = jnp.moveaxis(results[number], 0, axis)
        return results


class ViewPrograms:
    """The programs of one view, by the types of their arguments."""

    def __init__(self, fun: Callable, setting: Setting):
        self._fun, self._setting, self._size = fun, setting, setting.axes.size
        self._called: dict[Any, StepProgram] = {}  # by the types of calls: state in either form
        self._programs: dict[Any, StepProgram] = {}  # by the same types, but all state `[N, *s]`
        # By path, the leaves that vary in one of the programs: then they do in all of them.
        self._varying: dict[str, str] = {}
        # The last one, by the position and the structure of the argument.
        self._known: dict[tuple[int, Any], StateType] = {}
        self.last: StepProgram | None = None

    def program_for(self, call: MappedCall) -> StepProgram:
        """Return the program for a call; state leaves are `[*s]`, or `[N, *s]` where they vary."""
        types = [type_of(leaf) for leaf in call.leaves]
        key = _key_of(call, types)
        program = self._called.get(key) or self._find_or_build(call, types)
        self._called[key] = self.last = program
        return program

    def _find_or_build(self, call: MappedCall, types: list[Any]) -> StepProgram:
        """Return the program for a call of these types; build it if new, or more leaves vary."""
        args, _ = call.rebuild(call.leaves)
        state = [self._type_of_state(number, args[number]) for number in self._setting.state]
        stacked_call = self._stack_state(call, types, state)
        key = _key_of(call, stacked_call.leaves)
        program = self._programs.get(key)
        # A program that took a leaf to be uniform is of no use once the leaf varies in another.
        leaves = program.traced.state_leaves if program else ()
        is_outdated = any(leaf.uniform and leaf.path in self._varying for leaf in leaves)
        if program is None or is_outdated:
            with meshes.context_of(AbstractMesh((), ())):  # the user's would be in the types
                program = StepProgram.build(self._setting, stacked_call, state, self._varying)
            self._programs[key] = program
        self._add_varying({x.path: x.origin for x in program.traced.state_leaves if x.origin})
        is_explicit = {state_type.argument: state_type.is_explicit for state_type in state}
        for leaf, value in zip(program.traced.in_leaves, call.leaves, strict=True):
            if leaf is not None:
                self._check_form(leaf, jnp.shape(value), is_explicit=is_explicit[leaf.argument])
        return program

    def _stack_state(
        self, call: MappedCall, types: list[Any], state: Sequence[StateType]
    ) -> MappedCall:
        """Return a call of types in which every leaf of the state is `[N, *s]`."""
        types, leaf_axes = list(types), list(call.axes)
        for state_type in state:
            numbers = leaf_numbers(call, state_type.argument)
            for number, leaf in zip(numbers, state_type.leaves, strict=True):
                types[number] = jax.ShapeDtypeStruct((self._size, *leaf.shape), leaf.dtype)
                leaf_axes[number] = 0
        stacked_call = dataclasses.replace(call, leaves=types, axes=tuple(leaf_axes))
        if stacked_call.size != self._size:
            raise MappedAxisError(
                f"'{call.fun_name}' is mapped over {self._size} devices, but its arguments have "
                f"{stacked_call.size} slices. Give [N, b, ...] for N devices, as place_batch makes "
                "it of rows."
            )
        return stacked_call

    def _add_varying(self, origins: Varying) -> None:
        """Record where leaves begin to vary; they do in all programs from now on."""
        if not origins.keys() <= self._varying.keys():
            self._varying = {**origins, **self._varying}
            self._called.clear()  # its programs take these leaves to be uniform

    def _type_of_state(self, number: int, state: Any, stacked: Any = None) -> StateType:
        """Return and record the types `[*s]` of argument `number` of the state, on one device.

        `stacked` says, for all leaves or as a tree, which are `[N, *s]`. If it is None, the types
        are those of the last state of this structure if it fits; else no leaf is stacked.
        """
        paths_and_leaves, structure = jax.tree.flatten_with_path(state)
        last = self._known.get((number, structure))
        types = [type_of(leaf) for _, leaf in paths_and_leaves]
        if stacked is None and last is not None and last.fits(structure, types, self._size):
            return last
        name, local_size = axes.argument_name(self._fun, number), self._setting.axes.local_size
        paths = tuple(name + jax.tree_util.keystr(path) for path, _ in paths_and_leaves)
        leaves: list[jax.ShapeDtypeStruct] = []  # on one device
        flags = jax.tree.leaves(jax.tree.broadcast(stacked or False, state))
        for path, leaf_type, is_stacked in zip(paths, types, flags, strict=True):
            if is_stacked and leaf_type.shape[:1] not in ((self._size,), (local_size,)):
                raise ArgumentError(
                    f"The state is given as stacked over {local_size} devices, but {path} has "
                    f"shape {tuple(leaf_type.shape)}. Give stacked=False for it, or stack it."
                )
            shape = leaf_type.shape[1:] if is_stacked else leaf_type.shape
            leaves.append(jax.ShapeDtypeStruct(shape, leaf_type.dtype))
        kind = StateType(number, structure, paths, tuple(leaves), is_explicit=stacked is not None)
        if kind != last:  # of another state, other leaves may vary
            self._varying = {p: x for p, x in self._varying.items() if p not in paths}
        self._known[number, structure] = kind
        return kind

    def take_state(self, number: int, state: Any, stacked: Any) -> StateType:
        """Read argument `number` of the state; leaves that differ between devices now vary."""
        kind = self._type_of_state(number, state, stacked)
        self._called.clear()  # of programs that take it for another state
        for path, value, leaf in zip(kind.paths, jax.tree.leaves(state), kind.leaves, strict=True):
            if jnp.shape(value) == leaf.shape:
                continue
            slices = placement.put_slices(value, self._setting.axes.by_device)
            if not placement.are_equal(slices):  # as of dropout keys
                self._add_varying({path: "place (its copies differ)"})
        return kind

    def place_state(self, kind: StateType, state: Any) -> Any:
        """Place an argument of the state, which was taken, on the mesh."""
        leaves = self._setting.leaves_of(kind, self._varying)
        pairs = zip(jax.tree.leaves(state), leaves, strict=True)
        placed = [placement.place_leaf(value, leaf, self._setting.axes) for value, leaf in pairs]
        return jax.tree.unflatten(kind.structure, placed)

    def known_program(self, what: str) -> StepProgram:
        """Return the last program, for its report."""
        if self.last is None:
            raise ArgumentError(f"Call the view before its {what}, or place(state, *arguments).")
        return self.last

    def types(self) -> Any:
        """Return the types of the state, with shardings; several arguments give a tuple."""
        traced, trees = self.known_program("types").traced, []
        args, _ = traced.call.rebuild(traced.call.leaves)
        for number in self._setting.state:
            wholes = [leaf.whole for leaf in traced.state_leaves if leaf.argument == number]
            trees.append(jax.tree.unflatten(jax.tree.structure(args[number]), wholes))
        return trees[0] if len(trees) == 1 else tuple(trees)

    def _check_form(self, leaf: StateLeaf, shape: tuple[int, ...], *, is_explicit: bool) -> None:
        """Raise ArgumentError if `shape` is stacked but the leaf uniform, or if it is ambiguous."""
        # On 8 devices, (8, 2) may be a value (2,) for each, or one value for all.
        is_single = shape == leaf.type.shape
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
    """Return an argument with the sharding `target`; ArgumentError if it must not be moved there.

    `leaf` has the facts about a leaf of the state. `path` returns the argument's name, for errors.
    """
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
