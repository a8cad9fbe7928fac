"""Trace of a step, the leaves of its state that vary, and its program."""

from collections.abc import Iterable, Set
from typing import TypeAlias, cast

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._pmap import axes
from jax_dist._pmap.body import Call
from jax_dist._rewrite import interpreter, pipeline
from jax_dist._rewrite.uniformity import cut_along
from jax_dist.errors import ArgumentError
from jax_dist.global_view.analysis import AxisAnalysis, VaryingOrigin
from jax_dist.global_view.mesh_axes import axes_of_constraint
from jax_dist.global_view.placement import shardings_of
from jax_dist.global_view.programs import Setting, StepProgram
from jax_dist.global_view.regions import BodyPlan, PlanOptions, plan
from jax_dist.global_view.report import Leaf
from jax_dist.global_view.trace import TracedFunction

StateTypes: TypeAlias = dict[int, jax.ShapeDtypeStruct]  # by place, on one device


def build(setting: Setting, call: Call, state: StateTypes, varying: Set[int]) -> StepProgram:
    """Trace and plan a step, for a call of types, its state `[N, *s]` as under pmap.

    `state` has the types of its leaves on one device by place; those of `varying` come in varying.
    """
    try:
        traced = TracedFunction.of(setting.options, call, tuple(setting.model_axes.items()))
    except ValueError as error:
        text, *_ = str(error).split(" You probably")
        if not any(sign in text for sign in _CONSTRAINT_SIGNS):
            raise
        raise _constraint_error(pipeline.line_of(error), text) from error
    if traced.inner:
        inner = sorted(repr(axis.name) for axis in traced.inner)
        raise NotImplementedError(
            f"'{call.fun_name}' calls a mapped function inside, over {', '.join(inner)}. Map once, "
            "over a mesh of all devices, or keep jax_dist.pmap for this function."
        )
    for eqn in interpreter.equations(traced.jaxpr):
        if not axes_of_constraint(eqn) <= setting.model_axes.keys():
            raise _constraint_error(interpreter.source_line(eqn), eqn.params["sharding"])
    return _StepBuilder(setting, call, state, varying, traced).program()


# Of JAX, where a constraint is only a spec, which holds for the mesh that is traced on.
_CONSTRAINT_SIGNS = ("is not found in mesh", "can only refer to Auto axes of the mesh")


def _constraint_error(line: str, constraint: object) -> NotImplementedError:
    return NotImplementedError(
        f"with_sharding_constraint at {line or 'an unknown line'} ({constraint}) shards over the "
        "mapped axis, or over one that the mesh lacks. Remove it, and say by shardings= how the "
        "state is sharded; other axes of the mesh may be named."
    )


class _StepBuilder:
    """A traced step, of which the leaves of the state that vary are known."""

    def __init__(
        self,
        setting: Setting,
        call: Call,
        state: StateTypes,
        varying: Set[int],
        traced: TracedFunction,
    ):
        self._setting, self._call, self._state, self._traced = setting, call, state, traced
        self._jaxpr = interpreter.open_jaxpr(traced.jaxpr)
        self._axis = AxisAnalysis(setting.options.axis_name, setting.axes.sizes)
        self._results = self._pair_state()
        # What is captured is one object for all devices.
        self._captured = [True for _ in traced.lifted.captures]
        uniform = state.keys() - varying
        ins = [place in uniform or axis is None for place, axis in enumerate(call.axes)]
        first = len(self._captured)
        pairs = [(first + place, result) for result, place in self._results.items()]
        self._ins = self._axis.settle_state(traced.jaxpr, [*self._captured, *ins], pairs)
        self._uniform = self._axis.uniform_values(self._jaxpr, self._ins)

    def program(self) -> StepProgram:
        setting, call, traced, results = self._setting, self._call, self._traced, self._results
        leaves = self._leaves()
        wanted: list[P | None] = [None] * len(traced.out_axes)
        for result, place in results.items():
            if leaves[place].uniform and leaves[place].is_sharded:
                wanted[result] = leaves[place].sharding.spec
        meshes = _meshes_named(interpreter.equations(traced.jaxpr))
        options = PlanOptions(
            scatters=setting.gradients != "reduce",
            regathers=setting.regathers,
            tied=bool(meshes),
            in_one=not setting.model_axes and not any(wanted),
        )
        body_plan = plan(self._axis, traced.jaxpr, self._ins, wanted, options)
        self._check_results(body_plan)
        in_axes, in_shardings = [], []
        for place, (kind, axis) in enumerate(zip(call.leaves, call.axes, strict=True)):
            leaf = leaves.get(place)
            spec = axes.spec_of_axis(axis, len(kind.shape), setting.axes.part)
            in_axes.append(None if leaf and leaf.uniform else axis)
            in_shardings.append(leaf.sharding if leaf else NamedSharding(setting.mesh, spec))
        return StepProgram(
            setting,
            traced,
            body_plan,
            leaves,
            results,
            in_axes,
            in_shardings,
            call.structure,
            meshes,
        )

    def _pair_state(self) -> dict[int, int]:
        """Return which result leaf is the new value of which argument leaf."""
        call, avals = self._call, self._traced.jaxpr.out_avals
        numbers = jax.tree.unflatten(self._traced.out_tree, range(len(avals)))
        parts = [numbers, *numbers] if isinstance(numbers, tuple | list) else [numbers]
        args, _ = call.rebuild(list(range(len(call.leaves))))
        pairs: dict[int, int] = {}
        for argument in self._setting.state:
            places = [place for place in self._state if call.owners[place] == argument]
            kinds = [(self._state[place].shape, self._state[place].dtype) for place in places]
            structure = jax.tree.structure(args[argument])
            for part in parts:
                outs = jax.tree.leaves(part)
                if (
                    pairs.keys().isdisjoint(outs)
                    and jax.tree.structure(part) == structure
                    and [(avals[n].shape, avals[n].dtype) for n in outs] == kinds
                ):
                    pairs.update(zip(outs, places, strict=True))
                    break
            else:
                name = axes.argument_name(call.fun, argument)
                raise ArgumentError(
                    f"'{call.fun_name}' gives no new state: no result has the structure, shapes "
                    f"and dtypes of argument '{name}'. Give the position of the carried argument "
                    "by state=; None if there is none."
                )
        return pairs

    def _leaves(self) -> dict[int, Leaf]:
        setting, call = self._setting, self._call
        args, kwargs = jax.tree.unflatten(call.structure, call.leaves)
        short_paths = [  # as in "params/dense/kernel", from the argument on
            jax.tree_util.keystr(path, simple=True, separator="/")
            for tree in (*args, *(kwargs[name] for name in sorted(kwargs)))
            for path, _ in jax.tree.leaves_with_path(tree)
        ]
        kinds, paths = list(self._state.values()), call.paths()
        short = [short_paths[place] for place in self._state]
        shardings = shardings_of(setting.shardings, setting.by_device, short, kinds)
        leaves: dict[int, Leaf] = {}
        for (place, kind), sharding in zip(self._state.items(), shardings, strict=True):
            origin, wanted = self._origin(place), sharding.spec
            is_ruled = callable(setting.shardings)
            if origin is not None:
                if is_ruled and not cut_along(wanted).isdisjoint(setting.mesh_axes):
                    raise ArgumentError(
                        f"{paths[place]} cannot be sharded as {wanted}, for each device has "
                        f"another one: it begins to vary at {origin}. Average it over devices "
                        "(jax.lax.pmean), or let shardings give PartitionSpec() for it."
                    )
                spec = P(setting.axes.part, *(wanted if is_ruled else ()))
                sharding = NamedSharding(setting.mesh, spec)
            owner = cast(int, call.owners[place])
            leaves[place] = Leaf(owner, paths[place], kind, sharding, wanted, setting.size, origin)
        to_shard = [leaf for leaf in leaves.values() if cut_along(leaf.wanted)]
        if setting.shardings == "fsdp" and to_shard and not any(leaf.uniform for leaf in to_shard):
            origins = "; ".join(f"{leaf.path} at {leaf.origin}" for leaf in to_shard[:8])
            raise ArgumentError(
                f"No leaf of the state of '{call.fun_name}' can be sharded, for all begin to vary "
                f"between devices: {origins}. Average the gradients over devices (jax.lax.pmean) "
                "in the step, or use shardings='replicated'."
            )
        return leaves

    def _origin(self, place: int) -> VaryingOrigin | None:
        """Return where a leaf of the state began to vary, if it does."""
        if self._ins[len(self._captured) + place]:
            return None
        (result,) = [out for out, into in self._results.items() if into == place]
        return VaryingOrigin.find(self._jaxpr, self._uniform, self._jaxpr.outvars[result])

    def _check_results(self, body_plan: BodyPlan) -> None:
        """Raise ArgumentError for a result that varies and has out_axes=None."""
        traced = self._traced
        for place, (axis, uniform) in enumerate(zip(traced.out_axes, body_plan.outs, strict=True)):
            if axis is not None or uniform or place in self._results:
                continue
            origin = VaryingOrigin.find(self._jaxpr, self._uniform, self._jaxpr.outvars[place])
            tree = jax.tree.unflatten(traced.out_tree, range(len(traced.out_axes)))
            paths = {n: jax.tree_util.keystr(path) for path, n in jax.tree.leaves_with_path(tree)}
            raise ArgumentError(
                f"The result{paths[place]} of '{self._call.fun_name}' has out_axes=None, but it "
                f"begins to vary at {origin}. Average it over devices (jax.lax.pmean), or give "
                "out_axes=0 for it."
            )


def _meshes_named(eqns: Iterable[JaxprEqn]) -> set[AbstractMesh]:
    """Return the meshes that types name: these hold for one mesh alone."""
    atoms = [atom for eqn in eqns for atom in (*eqn.invars, *eqn.outvars)]
    shardings = [getattr(atom.aval, "sharding", None) for atom in atoms]
    return {
        sharding.mesh for sharding in shardings if sharding is not None and not sharding.mesh.empty
    }
