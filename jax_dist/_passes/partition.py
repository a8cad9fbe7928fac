"""custom_partitioning: a `jax.shard_map` around the op's own lowering, as the compiler shards it.

`partition` of the op is asked here, with the shardings that Shardy chooses for the call, and no
longer in the compiler. So the program holds the op's body and no address of a Python object, and
its cache key is the same in each process.

The function that `partition` returns is wrapped, not the body of the op: that one is written for
global arrays, and gives other numbers on blocks.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, _compat
from jax_dist._passes import PassFinding, PassPlan, interpreter, propagation
from jax_dist._passes.interpreter import Atom, Values
from jax_dist._passes.propagation import CallLayout
from jax_dist.errors import ArgumentError

Partitioning: TypeAlias = Literal["route", "keep"]
Specs: TypeAlias = Mapping[str, tuple[Any, Any]]  # name of an op: (in_specs, out_specs)


@dataclasses.dataclass(frozen=True)
class _Route:
    """A shard_map that replaces one custom_partitioning call."""

    op: str  # the name of the user's function
    mesh: Mesh
    lower: Callable[..., Any]  # from partition(): the op on blocks, in the trees of the op
    in_tree: Any
    layout: CallLayout  # how partition() wants the values of the call

    def __call__(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run the op on global arrays: by its lowering on each device's blocks, in a shard_map."""

        def body(*blocks: jax.Array) -> Values:
            return jax.tree.leaves(self.lower(*self.in_tree.unflatten(blocks)))

        body.__name__ = body.__qualname__ = self.op
        mapped = jax.shard_map(
            body,
            # If a mesh is set in the context, shard_map takes no other object than that.
            mesh=self.mesh if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=self.layout.operands,
            out_specs=list(self.layout.results),
            check_vma=False,
        )
        return mapped(*values)

    def __str__(self) -> str:
        spell = lambda specs: ", ".join(f"P({', '.join(map(repr, spec))})" for spec in specs)
        return f"shard_map, ({spell(self.layout.operands)}) -> ({spell(self.layout.results)})"


def plan_partitioning(
    jaxpr: ClosedJaxpr,
    *,
    meshes: Sequence[Mesh],
    in_shardings: Sequence[NamedSharding | None],
    specs: Specs | None = None,
) -> PassPlan:
    """Route each custom_partitioning equation of a program through `jax.shard_map`.

    Args:
      jaxpr: the program.
      meshes: what the arguments and the program mention; equations stay if there are several.
      in_shardings: one for each input of the jaxpr; None where it is not known.
      specs: by the name of an op, the specs of its operands (a sequence) and of its results (one,
        or a sequence), in place of those that the compiler would choose.

    Raises:
      ArgumentError: `specs` does not fit the op, or the mesh, or names an op that is not there.
    """
    # With jits inlined, each call of one can be sharded by itself.
    program = interpreter.inline_calls(jaxpr, propagation.is_plain_jit)
    eqns = interpreter.equations(program)
    calls = [eqn for eqn in eqns if _compat.name_of(eqn) == "custom_partitioning"]
    specs, names = specs or {}, dict.fromkeys(map(_name_of, calls))
    if calls and (unknown := sorted(specs.keys() - names)):
        raise ArgumentError(
            f"specs= names {', '.join(map(repr, unknown))}, but the custom_partitioning operations "
            f"of the program are {', '.join(map(repr, names))}."
        )
    # On one device, JAX puts the body of the op into the program itself.
    if not calls or not meshes or meshes[0].size == 1:
        return PassPlan(None)
    if len(meshes) > 1:
        why = "the program uses several meshes: choose one by mesh="
    elif not meshes[0].are_all_axes_auto:
        why = "the mesh has axes that are not Auto, on which shardings are types"
    else:
        return _route_calls(program, calls, meshes[0], in_shardings, specs)
    return PassPlan(None, tuple(_finding(eqn, "", why) for eqn in calls))


def _route_calls(
    program: ClosedJaxpr,
    calls: Sequence[JaxprEqn],
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding | None],
    specs: Specs,
) -> PassPlan:
    """Route the calls through `jax.shard_map` on a mesh, or say why one stays as it is."""
    in_shard_maps = {
        id(inner)
        for eqn in interpreter.equations(program)
        if _compat.name_of(eqn) == "shard_map"
        for inner in interpreter.equations(eqn.params["jaxpr"])
    }
    layouts = propagation.layouts_of(program, calls, mesh, in_shardings)
    routes: dict[int, _Route] = {}  # by the identity of the call
    findings: list[PassFinding] = []
    for eqn in calls:
        if id(eqn) not in layouts:  # lowering drops it
            continue
        layout, name = layouts[id(eqn)], _name_of(eqn)
        try:
            if id(eqn) in in_shard_maps:
                raise ValueError("it stands in a shard_map over some axes only, or another mesh")
            if name in specs:
                layout = _layout_from_specs(eqn, *specs[name])
            routes[id(eqn)] = _route_by_partition(eqn, layout, mesh)
            findings.append(_finding(eqn, str(routes[id(eqn)])))
        except (NotImplementedError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0].rstrip(":.")
            if name in specs:
                raise ArgumentError(f"specs= do not fit {name!r}: {why}.") from error
            findings.append(_finding(eqn, "", why))
    changed = interpreter.replace_equations(program, routes) if routes else None
    return PassPlan(changed, tuple(findings))


def _layout_from_specs(eqn: JaxprEqn, in_specs: Sequence[P], out_specs: Any) -> CallLayout:
    """Return a call's layout from the user's specs; raise ValueError if their counts differ."""
    results = (out_specs,) if isinstance(out_specs, P) else tuple(out_specs)
    if (len(in_specs), len(results)) != (len(eqn.invars), len(eqn.outvars)):
        counts = f"{len(eqn.invars)} operands (without static ones) and {len(eqn.outvars)} results"
        raise ValueError(f"it has {counts}, not {len(in_specs)} and {len(results)}")
    return CallLayout.make(eqn, in_specs, results)


def _route_by_partition(eqn: JaxprEqn, layout: CallLayout | None, mesh: Mesh) -> _Route:
    """Return the shard_map that an op asks for if its values are sharded as in `layout`.

    The op's `partition(*static_args, mesh, operand_types, result_types)` is called with types that
    have these shardings. It returns a mesh, a function of each device's blocks, and the shardings
    of results and operands for that; those may be others than in `layout`: for an op on rows,
    P("i", None) in place of P("i", "j"). ValueError is raised if no shard_map can express them, and
    perhaps by JAX or the op, as are TypeError and NotImplementedError.
    """
    params, in_tree, out_tree = eqn.params, eqn.params["in_tree"], eqn.params["out_tree"]
    if layout is None:
        raise ValueError("jax_use_shardy_partitioner is off, so its specs are unknown: give specs=")
    if not params["decode_shardings"]:
        raise ValueError("its partition() asks for XLA's own shardings (decode_shardings=False)")
    operand_types = _sharded_types(eqn.invars, layout.operands, mesh)
    result_types = _sharded_types(eqn.outvars, layout.results, mesh)
    types = in_tree.unflatten(operand_types), out_tree.unflatten(result_types)
    answer = params["partition"](*params["static_args"], mesh, *types)
    _, lower, out_shardings, in_shardings = answer
    in_specs = _specs_from_partition(in_tree.flatten_up_to(in_shardings), mesh)
    out_specs = _specs_from_partition(out_tree.flatten_up_to(out_shardings), mesh)
    route = _Route(_name_of(eqn), mesh, lower, in_tree, CallLayout.make(eqn, in_specs, out_specs))
    traced = jax.make_jaxpr(lambda *args: route(eqn, list(args)))(*operand_types)
    for var, out_aval in zip(eqn.outvars, traced.out_avals, strict=True):
        expected, actual = _describe_type(var.aval), _describe_type(out_aval)
        if actual != expected:
            raise ValueError(f"its lowering gives {actual}, and the operation {expected}")
    return route


def _describe_type(aval: Any) -> str:
    weak = " (weakly typed)" if aval.weak_type else ""
    return f"{aval.dtype}{list(aval.shape)}{weak}"


def _sharded_types(
    atoms: Sequence[Atom], specs: Sequence[P], mesh: Mesh
) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and dtypes with their shardings on the mesh, which partition() takes."""
    return [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=NamedSharding(mesh, spec))
        for atom, spec in zip(atoms, specs, strict=True)
    ]


def _specs_from_partition(shardings: Sequence[Any], mesh: Mesh) -> list[P]:
    """Return the shardings that partition() returned as specs; raise ValueError if one has none."""
    for sharding in shardings:
        is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        if not is_on_mesh or P.UNCONSTRAINED in sharding.spec:
            raise ValueError(f"its partition() returns {sharding}, which shard_map cannot take")
    return [sharding.spec for sharding in shardings]


def _name_of(eqn: JaxprEqn) -> str:
    """Return the name of the function that the user decorated."""
    return eqn.params["call"].jaxpr.debug_info.func_name


def _finding(eqn: JaxprEqn, done: str, why: str = "") -> PassFinding:
    """Return the finding of a call: what was done, or why it is left as it is."""
    what = f"custom_partitioning {_name_of(eqn)!r}: {'left as it is' if why else done}"
    code, line = _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP, interpreter.source_line(eqn)
    return PassFinding(code, "refused" if why else "rewritten", what, why, line)
