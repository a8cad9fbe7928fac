"""A step in the global view, for arguments of given types: settled, planned, and jitted."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.global_views import refusals, state_placement
from jax_dist.global_views.emission import Emitter
from jax_dist.global_views.islands import BodyPlan, plan
from jax_dist.global_views.report import GlobalViewReport, Leaf
from jax_dist.global_views.state_placement import Shardings
from jax_dist.global_views.uniformity import Axis as SharedAxis
from jax_dist.global_views.uniformity import VaryingOrigin, origin, settled_state
from jax_dist.mapping import axes, body, placement
from jax_dist.mapping.axes import AxisPrefix
from jax_dist.mapping.body import Body, Call, Options, type_of
from jax_dist.mapping.meshes import DeviceChoice
from jax_dist.passes import interpreter
from jax_dist.passes import programs as compiled
from jax_dist.passes.captures import Captures


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """What was said to `global_view`, checked; it asks for devices when its mesh is first read."""

    fun_name: str
    name: Any  # of the mapped axis
    in_axes: AxisPrefix
    out_axes: AxisPrefix
    state: tuple[int, ...]  # positions, as those below
    static: tuple[int, ...]
    donated: tuple[int, ...]
    given_mesh: Mesh | None
    shardings: Shardings
    scatters: bool
    regathers: bool
    captures: Captures

    @functools.cached_property
    def mesh(self) -> Mesh:
        """With Auto axes: on others, shardings are types, and a step has none."""
        if self.given_mesh is None:
            return _compat.auto_mesh(np.array(jax.devices()), (self.name,))
        return _compat.auto_mesh(self.given_mesh.devices, self.given_mesh.axis_names)

    @property
    def size(self) -> int:
        return self.mesh.shape[self.name]

    @property
    def by_device(self) -> NamedSharding:
        """Of `[N, *s]`."""
        return NamedSharding(self.mesh, P(self.name))

    @functools.cached_property
    def options(self) -> Options:
        """As for pmap."""
        devices = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(self.name), 0)
        return Options(
            axis_name=self.name,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            static=self.static,
            donated=self.donated,
            choice=DeviceChoice(
                fun_name=self.fun_name,
                axis_name=self.name,
                devices=tuple(row[0] for row in devices.reshape(len(devices), -1)),
                backend=None,
                axis_size=None,
                virtual=False,
            ),
            arrays="global",
            captures=self.captures,
            gathers="keep",
        )


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """For one signature: what is found of its state, and the jit object."""

    setting: Setting
    body: Body
    plan: BodyPlan
    leaves: dict[int, Leaf]  # by the place of the argument leaf
    results: dict[int, int]  # the place of each result leaf that is of the state -> of its argument
    in_axes: tuple[Any, ...]  # of each argument leaf; of the state, None where it is shared
    in_shardings: tuple[NamedSharding, ...]
    structure: Any  # of the arguments that are not static
    donated: tuple[int, ...]  # positions among these
    meshes: set[AbstractMesh]  # that the types in the body name

    @functools.cached_property
    def captured(self) -> tuple[jax.Array, ...]:
        """What the function captures, on all devices: the first argument of the jit object."""
        whole = NamedSharding(self.setting.mesh, P())
        with jax.ensure_compile_time_eval():  # it outlives a trace around the first call
            return tuple(
                state_placement.put_whole(value, whole) for value in self.body.lifted.values
            )

    @property
    def report(self) -> GlobalViewReport:
        islands = [island for _, island in self.plan.islands()]
        scattered = sum(len(island.scatters) for island in islands)
        return GlobalViewReport(
            self.setting.fun_name,
            self.setting.size,
            tuple(self.leaves.values()),
            len(islands),
            scattered if self.emitter.cuts_state else 0,
        )

    @property
    def cacheable(self) -> bool:
        """Whether it holds nothing of a trace outside."""
        return not any(isinstance(value, Tracer) for value in self.plan.consts)

    @functools.cached_property
    def emitter(self) -> Emitter:
        mesh = self.setting.mesh.abstract_mesh
        # As a shard_map over all axes shows it.
        inside = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual))
        cuts = any(leaf.is_cut for leaf in self.leaves.values())
        return Emitter(
            self.setting.mesh,
            self.setting.name,
            cuts_state=cuts,
            regathers=self.setting.regathers,
            reorders=self.setting.scatters,
            anew=bool(self.meshes),
            anew_inside=bool(self.meshes - {inside}),
        )

    @functools.cached_property
    def out_shardings(self) -> tuple[NamedSharding, ...]:
        found = []
        for place, axis in enumerate(self.body.out_axes):
            if place in self.results:
                found.append(self.leaves[self.results[place]].sharding)
            else:
                rank = self.body.jaxpr.out_avals[place].ndim + 1
                spec = axes.spec_of_axis(axis, rank, self.setting.name)
                found.append(NamedSharding(self.setting.mesh, spec))
        return tuple(found)

    @functools.cached_property
    def jitted(self) -> Any:
        """Takes the arguments that are not static, as they are kept; and keywords as a dict.

        What is captured comes before them, as one argument, if there is any.
        """

        def step(*args: Any) -> Any:
            return jax.tree.unflatten(self.body.out_tree, self._run(jax.tree.leaves(args)))

        step.__name__ = step.__qualname__ = self.setting.fun_name
        whole = NamedSharding(self.setting.mesh, P())
        first = ((whole,) * self._hidden,) if self._hidden else ()
        return jax.jit(
            step,
            in_shardings=(*first, *self.arguments(self.in_shardings)),
            out_shardings=jax.tree.unflatten(self.body.out_tree, self.out_shardings),
            donate_argnums=tuple(number + len(first) for number in self.donated),
        )

    def call(self, leaves: Sequence[Any]) -> Any:
        """Runs it for leaves that lie where it takes them."""
        first = (self.captured,) if self._hidden else ()
        return self.jitted(*first, *self.arguments(leaves))

    def lower(self, types: Sequence[Any]) -> jax.stages.Lowered:
        """The program for such leaves, without what is captured among its arguments."""
        args = self.arguments(types)
        if not self._hidden:
            return self.jitted.lower(*args)
        lowered = self.jitted.lower(self.captured, *args)
        return compiled.lowered_without(lowered, self.captured)

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Leaves as arguments of the step."""
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return (*args, kwargs) if kwargs else args

    @property
    def _hidden(self) -> int:
        return len(self.body.lifted.captures)

    def _run(self, leaves: Sequence[jax.Array]) -> list[Any]:
        run = self.emitter
        captured, leaves = leaves[: self._hidden], leaves[self._hidden :]
        given = [
            run.laid(leaf if axis is None else jnp.moveaxis(leaf, axis, 0), spec)
            for leaf, axis, spec in zip(leaves, self.in_axes, self._specs_inside(), strict=True)
        ]
        outs = run.run(self.plan, [*captured, *given])
        results = []
        for place, (out, is_shared) in enumerate(zip(outs, self.plan.outs, strict=True)):
            axis = self.body.out_axes[place]
            if place in self.results:
                axis = None if self.leaves[self.results[place]].shared else 0
            if axis is not None:
                out = jnp.moveaxis(run.as_varying(out, is_shared=is_shared), 0, axis)
            results.append(out)
        return results

    def _specs_inside(self) -> list[P]:
        """How arguments lie when their mapped dimension is the first."""
        found = []
        for place, axis in enumerate(self.in_axes):
            shared = self.leaves[place].sharding.spec if place in self.leaves else P()
            found.append(shared if axis is None else P(self.setting.name))
        return found


def build(setting: Setting, call: Call, state: Sequence[int]) -> StepProgram:
    """Traces and settles a step.

    Args:
      setting: what was said.
      call: of types; leaves of the state as under pmap, `[N, *s]` and mapped over the first.
      state: the places of the leaves of the state.
    """
    found = body.traced(setting.options, call)
    _check_body(call, found)
    axis = SharedAxis(found.axis, setting.size)
    results = _results_of_state(setting, call, found, state)
    ins = [place in state or of_leaf is None for place, of_leaf in enumerate(call.axes)]
    hidden = len(found.lifted.captures)
    pairs = [(hidden + place, result) for result, place in results.items()]
    # What is captured is one object for all devices.
    ins = settled_state(axis, found.jaxpr, [*[True] * hidden, *ins], pairs)[hidden:]
    leaves = _leaves(setting, call, found, axis, ins, state, results)
    wanted: list[P | None] = [None] * len(found.out_axes)
    for result, place in results.items():
        if leaves[place].shared and leaves[place].is_cut:
            wanted[result] = leaves[place].sharding.spec
    named = _named_meshes(found.jaxpr)
    given, tied = [*[True] * hidden, *ins], bool(named)
    planned = plan(axis, found.jaxpr, given, wanted, scatters=setting.scatters, tied=tied)
    _check_results(call, found, axis, planned, results)
    in_axes = tuple(
        (None if ins[place] else 0) if place in state else of_leaf
        for place, of_leaf in enumerate(call.axes)
    )
    return StepProgram(
        setting,
        found,
        planned,
        leaves,
        results,
        in_axes,
        tuple(
            leaves[place].sharding
            if place in leaves
            else NamedSharding(setting.mesh, axes.spec_of_axis(of, len(leaf.shape), setting.name))
            for place, (leaf, of) in enumerate(zip(call.leaves, in_axes, strict=True))
        ),
        call.structure,
        _donated(setting.options),
        named,
    )


def _donated(options: Options) -> tuple[int, ...]:
    """Positions among the arguments that are not static."""
    return tuple(
        number - sum(static < number for static in options.static)
        for number in options.donated
        if number not in options.static
    )


def _slice_type(leaf: Any, axis: Any) -> jax.ShapeDtypeStruct:
    """The type of what one device sees."""
    kind = body.type_of(leaf)
    shape = list(kind.shape)
    if axis is not None:
        del shape[axis]
    return jax.ShapeDtypeStruct(shape, kind.dtype)


# ---- the state among the results


def _results_of_state(
    setting: Setting, call: Call, found: Body, state: Sequence[int]
) -> dict[int, int]:
    """Which result leaf is the new value of which argument leaf."""
    numbers = jax.tree.unflatten(found.out_tree, range(len(found.out_axes)))
    parts = [numbers] if not isinstance(numbers, tuple | list) else [numbers, *numbers]
    taken: set[int] = set()
    pairs: dict[int, int] = {}
    for argument in setting.state:
        own = [place for place in state if call.owners[place] == argument]
        args, _ = call.rebuild(list(range(len(call.leaves))))
        structure = jax.tree.structure(args[argument])
        for part in parts:
            outs = jax.tree.leaves(part)
            if taken & set(outs) or jax.tree.structure(part) != structure:
                continue
            if all(_same_type(call, found, *pair) for pair in zip(own, outs, strict=True)):
                pairs.update(zip(outs, own, strict=True))
                taken |= set(outs)
                break
        else:
            name = axes.argument_name(call.fun, argument)
            raise refusals.no_state_result(call.fun_name, name)
    return pairs


def _same_type(call: Call, found: Body, place: int, result: int) -> bool:
    own, new = _slice_type(call.leaves[place], call.axes[place]), found.jaxpr.out_avals[result]
    return own.shape == new.shape and own.dtype == new.dtype


# ---- the leaves of the state


def _leaves(
    setting: Setting,
    call: Call,
    found: Body,
    axis: SharedAxis,
    ins: Sequence[bool],
    state: Sequence[int],
    results: dict[int, int],
) -> dict[int, Leaf]:
    paths, short = call.paths(), _short_paths(call)
    types = [_slice_type(call.leaves[place], call.axes[place]) for place in state]
    specs = state_placement.specs_of(
        setting.shardings, setting.mesh, setting.name, [short[place] for place in state], types
    )
    result_of = {place: result for result, place in results.items()}
    leaves: dict[int, Leaf] = {}
    for place, type_, spec in zip(state, types, specs, strict=True):
        why, through = None, ()
        if not ins[place]:
            why = _origin(found, axis, ins, place, result_of[place])
            of_inputs = _paths_of_inputs(call, found)
            through = tuple(of_inputs[n] for n in why.inputs if of_inputs[n] != paths[place])
            if callable(setting.shardings) and state_placement.is_cut(spec):
                raise refusals.varies_but_cut(paths[place], spec, str(why), through)
            spec = P(setting.name)
        leaves[place] = Leaf(
            cast(int, call.owners[place]),
            paths[place],
            type_,
            ins[place],
            NamedSharding(setting.mesh, spec),
            setting.size,
            why,
            through,
        )
    _check_something_cut(setting, call, specs, leaves)
    return leaves


def _origin(
    found: Body, axis: SharedAxis, ins: Sequence[bool], place: int, result: int
) -> VaryingOrigin:
    """Where one leaf began to vary, if it came in shared, and all others as they have settled."""
    hidden = [True] * len(found.lifted.captures)
    supposed = [*hidden, *[n == place or shared for n, shared in enumerate(ins)]]
    if axis.shared_out(found.jaxpr, supposed)[result]:
        supposed = [*hidden, *ins]  # it varies by way of the others
    jaxpr = interpreter.open_jaxpr(found.jaxpr)
    shared = axis.shared_in(jaxpr, supposed)
    return origin(jaxpr, shared, jaxpr.outvars[result], jaxpr.invars[len(hidden) + place])


def _paths_of_inputs(call: Call, found: Body) -> list[str]:
    return [*(capture.name for capture in found.lifted.captures), *call.paths()]


def _check_something_cut(
    setting: Setting, call: Call, specs: Sequence[P], leaves: dict[int, Leaf]
) -> None:
    wanted = [
        leaf
        for leaf, spec in zip(leaves.values(), specs, strict=True)
        if state_placement.is_cut(spec)
    ]
    if setting.shardings == "fsdp" and wanted and not any(leaf.shared for leaf in wanted):
        which = [f"{leaf.path} begins to vary at {leaf.origin}" for leaf in wanted[:8]]
        raise refusals.nothing_to_cut(call.fun_name, which)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a leaf; static arguments have leaves of their own."""

    number: int


def _short_paths(call: Call) -> list[str]:
    """As in "params/dense/kernel", from the argument on."""
    args, kwargs = call.rebuild([_Place(number) for number in range(len(call.leaves))])
    found = [""] * len(call.leaves)
    for tree in (*args, *kwargs.values()):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if isinstance(leaf, _Place):
                found[leaf.number] = jax.tree_util.keystr(path, simple=True, separator="/")
    return found


# ---- what cannot be


def _check_body(call: Call, found: Body) -> None:
    if found.regions:
        raise refusals.nested_map(call.fun_name, [str(each) for each in found.regions])
    for eqn in interpreter.equations(found.jaxpr):
        if eqn.primitive.name == "sharding_constraint":
            sharding = eqn.params["sharding"]
            if state_placement.is_cut(getattr(sharding, "spec", P())):
                raise refusals.constrained_inside(interpreter.source_line(eqn), sharding)


def _check_results(
    call: Call, found: Body, axis: SharedAxis, planned: BodyPlan, results: dict[int, int]
) -> None:
    for place, (of_result, is_shared) in enumerate(zip(found.out_axes, planned.outs, strict=True)):
        if of_result is None and not is_shared and place not in results:
            jaxpr = interpreter.open_jaxpr(found.jaxpr)
            shared = axis.shared_in(jaxpr, planned.ins)
            result: Any = jaxpr.outvars[place]
            why = origin(jaxpr, shared, result, Var(result.aval))
            tree = jax.tree.unflatten(found.out_tree, range(len(found.out_axes)))
            named = {n: jax.tree_util.keystr(path) for path, n in jax.tree.leaves_with_path(tree)}
            paths = _paths_of_inputs(call, found)
            through = [paths[n] for n in why.inputs]
            raise refusals.result_varies(
                call.fun_name, f"the result{named[place]}", str(why), through
            )


def _named_meshes(jaxpr: Any) -> set[AbstractMesh]:
    """The meshes that the types in a body name; they then hold for these alone."""
    found: set[AbstractMesh] = set()
    for eqn in interpreter.equations(jaxpr):
        for atom in (*eqn.invars, *eqn.outvars):
            sharding = getattr(atom.aval, "sharding", None)
            if sharding is not None and not sharding.mesh.empty:
                found.add(sharding.mesh)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """What to do with calls of the same types."""

    program: StepProgram
    lifted: tuple[int, ...]  # leaves of the state that vary, and come as if they were shared
    merged: tuple[int, ...]  # those that are shared, and come as if they varied

    def given(self, call: Call) -> list[Any]:
        """The leaves where the program wants them."""
        placed = list(call.leaves)
        for place in self.lifted:
            leaf = self.program.leaves[place]
            placed[place] = state_placement.for_each_device(placed[place], leaf.size, leaf.sharding)
        for place in self.merged:
            leaf = self.program.leaves[place]
            if isinstance(placed[place], Tracer):
                raise refusals.stacked_in_trace(leaf.path)
            slices = state_placement.put_slices(placed[place], self.program.setting.by_device)
            placed[place] = state_placement.one_of_equals(slices, leaf.sharding, leaf.path)
        for place, target in enumerate(self.program.in_shardings):
            leaf = placed[place]
            if isinstance(leaf, Tracer):
                continue
            if not (target.is_fully_addressable or target.is_fully_replicated):
                self._check_is_of_all(call, place)
            if not isinstance(leaf, jax.Array):
                continue
            if leaf.sharding == target or not leaf.committed:
                continue
            own = self.program.leaves.get(place)
            if own is not None and not leaf.sharding.is_equivalent_to(target, leaf.ndim):
                raise refusals.lies_elsewhere(own.path, leaf.sharding, target.spec)
            placed[place] = placement.put_as_jit_would(leaf, target)
        return placed

    def _check_is_of_all(self, call: Call, place: int) -> None:
        """Raises PlacementError for what is to be cut over processes, and is of this one alone."""
        leaf = call.leaves[place]
        if place in (*self.lifted, *self.merged) or (
            isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        ):
            return
        path, kind = call.paths()[place], f"{type(leaf).__module__}.{type(leaf).__name__}"
        if isinstance(leaf, jax.Array):
            kind = "jax.Array on devices of this process"
        raise refusals.host_array(path, jnp.shape(leaf), kind, jax.process_count())

    def types(self, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The types of the leaves as the program takes them."""
        own = self.program.leaves
        return [own[n].whole if n in own else type_of(leaf) for n, leaf in enumerate(leaves)]
