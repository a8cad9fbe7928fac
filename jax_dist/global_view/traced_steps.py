"""Traces a step, finds which leaves of its state are shared, and plans it."""

from collections.abc import Sequence, Set
from typing import Any, cast

import jax
from jax.extend.core import Var
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._pmap import axes
from jax_dist._pmap.body import Call
from jax_dist._rewrite import interpreter, pipeline
from jax_dist._rewrite.uniformity import cut_along
from jax_dist.errors import ArgumentError
from jax_dist.global_view import state_placement
from jax_dist.global_view.body import Body
from jax_dist.global_view.islands import BodyPlan, Choices, plan
from jax_dist.global_view.mesh_axes import names_of_constraint
from jax_dist.global_view.programs import Setting, StateLeaves, StepProgram
from jax_dist.global_view.report import Leaf
from jax_dist.global_view.uniformity import SharedAxis, VaryingOrigin


def build(
    setting: Setting, call: Call, state: StateLeaves, varying: Set[int] = frozenset()
) -> StepProgram:
    """Traces and settles a step, for a call of types, its state `[N, *s]` as under pmap.

    `state`: by place, the types of its leaves on one device; those of `varying` come in varying.
    """
    try:
        found = Body.of(setting.options, call)
    except ValueError as error:
        said, *_ = str(error).split(" You probably")
        if not any(sign in said for sign in _CONSTRAINT_SIGNS):
            raise
        raise _bad_constraint(pipeline.line_of(error), said) from error
    if found.inner:
        regions = sorted(repr(axis.name) for axis in found.inner)
        raise NotImplementedError(
            f"'{call.fun_name}' calls a mapped function inside, over {', '.join(regions)}. Map "
            "once, over a mesh of all devices, or keep jax_dist.pmap for this function."
        )
    for eqn in interpreter.equations(found.jaxpr):
        if not names_of_constraint(eqn) <= setting.further:
            raise _bad_constraint(interpreter.source_line(eqn), eqn.params["sharding"])
    return _TracedStep(setting, call, state, varying, found).program()


# Of JAX, where a constraint is only a spec, which holds for the mesh that is traced on.
_CONSTRAINT_SIGNS = ("is not found in mesh", "can only refer to Auto axes of the mesh")


def _bad_constraint(line: str, constraint: object) -> NotImplementedError:
    return NotImplementedError(
        f"with_sharding_constraint at {line or 'an unknown line'} ({constraint}) shards over the "
        "mapped axis, or over one that the mesh lacks. Remove it, and say by shardings= how the "
        "state is sharded; other axes of the mesh may be named."
    )


class _TracedStep:
    """Finds which leaves of the state of a traced step are shared, and plans the step."""

    def __init__(
        self, setting: Setting, call: Call, state: StateLeaves, varying: Set[int], found: Body
    ):
        self._setting, self._call, self._state, self._body = setting, call, state, found
        self._axis = SharedAxis(setting.name, setting.axes.sizes)
        self._paths = call.paths()
        self._captures = [capture.name for capture in found.lifted.captures]
        self._results = self._results_of_state()
        # What is captured is one object for all devices.
        hidden = [True] * len(self._captures)
        shared = state.keys() - varying
        ins = [place in shared or of_leaf is None for place, of_leaf in enumerate(call.axes)]
        pairs = [(len(hidden) + place, result) for result, place in self._results.items()]
        self._ins = self._axis.settled(found.jaxpr, [*hidden, *ins], pairs)

    def program(self) -> StepProgram:
        setting, call, found = self._setting, self._call, self._body
        leaves = self._leaves()
        wanted: list[P | None] = [None] * len(found.out_axes)
        for result, place in self._results.items():
            if leaves[place].shared and leaves[place].is_cut:
                wanted[result] = leaves[place].sharding.spec
        meshes = {  # types that name one hold for it alone
            sharding.mesh
            for eqn in interpreter.equations(found.jaxpr)
            for atom in (*eqn.invars, *eqn.outvars)
            if (sharding := getattr(atom.aval, "sharding", None)) is not None
            and not sharding.mesh.empty
        }
        in_one = not (
            setting.further or any(leaf.is_cut for leaf in leaves.values() if leaf.shared)
        )
        choices = Choices(setting.gradients, setting.regathers, bool(meshes), in_one)
        planned = plan(self._axis, found.jaxpr, self._ins, wanted, choices)
        self._check_results(planned)
        in_axes, lie = [], []  # of each argument leaf
        for place, (leaf, axis) in enumerate(zip(call.leaves, call.axes, strict=True)):
            if place in leaves:
                in_axes.append(None if leaves[place].shared else 0)
                lie.append(leaves[place].sharding)
            else:
                in_axes.append(axis)
                spec = axes.spec_of_axis(axis, len(leaf.shape), setting.axes.part)
                lie.append(NamedSharding(setting.mesh, spec))
        return StepProgram(
            setting, found, planned, leaves, self._results, in_axes, lie, call.structure, meshes
        )

    def _results_of_state(self) -> dict[int, int]:
        """Which result leaf is the new value of which argument leaf."""
        call, avals = self._call, self._body.jaxpr.out_avals
        numbers = jax.tree.unflatten(self._body.out_tree, range(len(avals)))
        parts = [numbers, *numbers] if isinstance(numbers, tuple | list) else [numbers]
        args, _ = call.rebuild(list(range(len(call.leaves))))
        pairs: dict[int, int] = {}
        for argument in self._setting.state:
            own = [place for place in self._state if call.owners[place] == argument]
            kinds = [(self._state[place].shape, self._state[place].dtype) for place in own]
            structure = jax.tree.structure(args[argument])
            for part in parts:
                outs = jax.tree.leaves(part)
                if (
                    pairs.keys().isdisjoint(outs)
                    and jax.tree.structure(part) == structure
                    and [(avals[n].shape, avals[n].dtype) for n in outs] == kinds
                ):
                    pairs.update(zip(outs, own, strict=True))
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
        setting, call, hidden = self._setting, self._call, len(self._captures)
        args, kwargs = jax.tree.unflatten(call.structure, call.leaves)
        short = [  # as in "params/dense/kernel", from the argument on
            jax.tree_util.keystr(path, simple=True, separator="/")
            for tree in (*args, *(kwargs[name] for name in sorted(kwargs)))
            for path, _ in jax.tree.leaves_with_path(tree)
        ]
        paths, kinds = [short[place] for place in self._state], list(self._state.values())
        layouts = state_placement.layouts_of(setting.shardings, setting.by_device, paths, kinds)
        result_of = {place: result for result, place in self._results.items()}
        leaves: dict[int, Leaf] = {}
        for (place, kind), layout in zip(self._state.items(), layouts, strict=True):
            path, shared, why, through = self._paths[place], self._ins[hidden + place], None, ()
            spec = layout.spec
            if not shared:
                why = self._origin(hidden + place, result_of[place])
                through = tuple(each for each in self._paths_of(why) if each != path)
                is_cut = cut_along(spec) & {*setting.mesh_axes}
                if callable(setting.shardings) and is_cut:
                    raise ArgumentError(
                        f"{path} cannot be sharded as {spec}, for each device has another one: "
                        f"{_begins(why, through)}. Average it over devices (jax.lax.pmean) "
                        f"{_when(why)}, or let shardings give PartitionSpec() for it."
                    )
            owner = cast(int, call.owners[place])
            further = spec if callable(setting.shardings) else ()
            own = spec if shared else P(setting.axes.part, *further)
            lie = NamedSharding(setting.mesh, own)
            leaves[place] = Leaf(owner, path, kind, shared, lie, spec, setting.size, why, through)
        if setting.shardings == "fsdp":
            self._check_something_cut(leaves)
        return leaves

    def _origin(self, place: int, result: int) -> VaryingOrigin:
        """Where one leaf began to vary, if it came in shared, and all others as they have settled.

        It is at this place among the inputs of the body, and at that among the results.
        """
        supposed = [n == place or shared for n, shared in enumerate(self._ins)]
        if self._axis.shared_out(self._body.jaxpr, supposed)[result]:
            supposed = self._ins  # it varies by way of the others
        jaxpr = interpreter.open_jaxpr(self._body.jaxpr)
        shared = self._axis.shared_in(jaxpr, supposed)
        return VaryingOrigin.of(jaxpr, shared, jaxpr.outvars[result], jaxpr.invars[place])

    def _paths_of(self, why: VaryingOrigin) -> list[str]:
        """The names of the inputs that vary and reach a value."""
        paths = [*self._captures, *self._paths]
        return [paths[n] for n in why.inputs]

    def _check_something_cut(self, leaves: dict[int, Leaf]) -> None:
        wanted = [leaf for leaf in leaves.values() if cut_along(leaf.wanted)]
        if wanted and not any(leaf.shared for leaf in wanted):
            origins = "; ".join(f"{leaf.path} at {leaf.origin}" for leaf in wanted[:8])
            raise ArgumentError(
                f"No leaf of the state of '{self._call.fun_name}' can be sharded, for all begin to "
                f"vary between devices: {origins}. Average the gradients over devices "
                "(jax.lax.pmean) in the step, or use shardings='replicated'."
            )

    def _check_results(self, planned: BodyPlan) -> None:
        found = self._body
        for place, (axis, shared) in enumerate(zip(found.out_axes, planned.outs, strict=True)):
            if axis is not None or shared or place in self._results:
                continue
            jaxpr = interpreter.open_jaxpr(found.jaxpr)
            result: Any = jaxpr.outvars[place]
            facts = self._axis.shared_in(jaxpr, planned.ins)
            why = VaryingOrigin.of(jaxpr, facts, result, Var(result.aval))
            tree = jax.tree.unflatten(found.out_tree, range(len(found.out_axes)))
            named = {n: jax.tree_util.keystr(path) for path, n in jax.tree.leaves_with_path(tree)}
            raise ArgumentError(
                f"The result{named[place]} of '{self._call.fun_name}' has out_axes=None, but "
                f"{_begins(why, self._paths_of(why))}. Average it over devices (jax.lax.pmean) "
                f"{_when(why)}, or give out_axes=0 for it."
            )


def _when(why: VaryingOrigin) -> str:
    return "after that line" if why.is_unknown else "before that line"


def _begins(why: VaryingOrigin, inputs: Sequence[str]) -> str:
    through = f", through {', '.join(inputs)}" if inputs else ""
    return f"it begins to vary at {why}{through}"
