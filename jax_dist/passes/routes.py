"""One call of a custom_partitioning op, as a `jax.shard_map` around its own lowering.

The function that `partition` returns is wrapped, not the body of the op: that one is written for
whole arrays, and gives other numbers on blocks.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.passes.equation_paths import EquationPlace
from jax_dist.passes.interpreter import Atom, Values
from jax_dist.passes.propagation import CallLayout


class RouteRefused(Exception):
    """A call stays as it is; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Route:
    """What stands in the place of the call. `Layout` has one spec for each value, of full rank."""

    op: str
    mesh: Mesh
    axes: tuple[str, ...]  # of the mesh, without those that a shard_map around it has taken
    lower: Callable[..., Any]  # of blocks, in the trees of the op
    in_tree: Any
    chosen: CallLayout  # how its values lie in the program
    taken: CallLayout  # how its partition() wants them
    check_vma: bool  # as the shard_map around it; else False: the compiler tracks no such types

    def __call__(self, eqn: JaxprEqn, values: Values) -> Values:
        """Takes and returns whole arrays, as the call does."""
        mapped = jax.shard_map(
            self._body(),
            mesh=self.mesh if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=self.taken.operands,
            out_specs=list(self.taken.results),
            axis_names=set(self.axes),
            check_vma=self.check_vma,
        )
        # As chosen first, even if moved right after: else the rest of the program, which follows
        # what is said of its values, would be cut in another way than before.
        operands = self._pinned(values, self.chosen.operands, self.taken.operands)
        if _is_explicit(self.mesh):
            operands = map(self._placed, operands, self.taken.operands)
        results = self._pinned(mapped(*operands), self.chosen.results, self.taken.results)
        return [_as_varying(x, var) for x, var in zip(results, eqn.outvars, strict=True)]

    def __str__(self) -> str:
        operands, results = (
            ", ".join(map(_written, specs)) for specs in (self.taken.operands, self.taken.results)
        )
        return f"shard_map, ({operands}) -> ({results})"

    def is_whole_everywhere(self) -> bool:
        """Whether every device computes all of it, and nothing asked for that."""
        return not any(axes_of(spec) for spec in (*self.chosen.operands, *self.chosen.results))

    def with_operand(self, number: int, spec: P) -> "Route":
        """The same, where the operand lies by `spec` in the program."""
        operands = [*self.chosen.operands]
        operands[number] = spec
        chosen = dataclasses.replace(self.chosen, operands=tuple(operands))
        return dataclasses.replace(self, chosen=chosen)

    def with_result(self, number: int, spec: P) -> "Route":
        """The same, where the result lies by `spec` in the program."""
        results = [*self.chosen.results]
        results[number] = spec
        return dataclasses.replace(
            self, chosen=dataclasses.replace(self.chosen, results=tuple(results))
        )

    def _body(self) -> Callable[..., Values]:
        def body(*blocks: jax.Array) -> Values:
            return jax.tree.leaves(self.lower(*self.in_tree.unflatten(blocks)))

        body.__name__ = body.__qualname__ = self.op
        return body

    def _pinned(self, values: Values, chosen: Sequence[P], taken: Sequence[P]) -> Values:
        pairs = zip(values, chosen, taken, strict=True)
        return [self._placed(x, there) if there != here else x for x, there, here in pairs]

    def _placed(self, x: jax.Array, spec: P) -> jax.Array:
        # Inside a shard_map, or under jax.set_mesh, the mesh of the context knows more of its axes.
        here = jax.sharding.get_abstract_mesh().empty
        sharding = NamedSharding(self.mesh, spec) if here else spec
        place = (
            jax.sharding.reshard if _is_explicit(self.mesh) else jax.lax.with_sharding_constraint
        )
        return place(x, sharding)


def route(site: EquationPlace, layout: CallLayout, mesh: Mesh) -> Route:
    """Asks the op's `partition` how it is computed on blocks.

    Args:
      site: the call.
      layout: how its operands and results lie.
      mesh: of devices.

    Raises:
      Refused: the answer cannot be said as a shard_map.
    """
    params = site.eqn.params
    axes = free_axes(site, mesh)
    _check(site, mesh, axes)
    if _is_explicit(mesh):  # what the types say is what the program must get back
        layout = dataclasses.replace(layout, results=_typed(site.eqn.outvars))
    asked = (
        params["in_tree"].unflatten(_shapes(site.eqn.invars, layout.operands, mesh)),
        params["out_tree"].unflatten(_shapes(site.eqn.outvars, layout.results, mesh)),
    )
    own_mesh, lower, results, operands = params["partition"](*params["static_args"], mesh, *asked)
    if own_mesh != mesh:
        raise RouteRefused("its partition() returns another mesh than it was given")
    taken = CallLayout(
        _specs(params["in_tree"].flatten_up_to(operands), site.eqn.invars, mesh, axes),
        _specs(params["out_tree"].flatten_up_to(results), site.eqn.outvars, mesh, axes),
    )
    _check_lowering(lower, site, taken, mesh)
    checks = any(eqn.params["check_vma"] for eqn in _regions(site))
    made = Route(name_of(site), mesh, axes, lower, params["in_tree"], layout, taken, checks)
    if checks:
        _check_types(made, site.eqn)
    return made


def name_of(site: EquationPlace) -> str:
    """Of the function that the user decorated."""
    return site.eqn.params["call"].jaxpr.debug_info.func_name


def free_axes(site: EquationPlace, mesh: Mesh) -> tuple[str, ...]:
    """The axes that no shard_map around the call takes, of the mesh there."""
    regions = _regions(site)
    taken = [axis for eqn in regions for axis in eqn.params["newly_manual_axes"]]
    names = regions[-1].params["mesh"].axis_names if regions else mesh.axis_names
    return tuple(axis for axis in names if axis not in taken)


def axes_of(spec: P) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in _entry_axes(entry))


def full(spec: P, rank: int) -> P:
    """The same spec in its one form: an entry a dimension, and no tuple of one.

    >>> full(P(("i",)), 2) == P("i", None)
    True
    """
    entries = [_entry_axes(entry) for entry in spec]
    short = [axes[0] if len(axes) == 1 else axes or None for axes in entries]
    return P(*short, *[None] * (rank - len(short)))


def _regions(site: EquationPlace) -> list[JaxprEqn]:
    """The shard_maps around the call."""
    return [eqn for eqn in site.around if eqn.primitive.name == "shard_map"]


def _check(site: EquationPlace, mesh: Mesh, axes: Sequence[str]) -> None:
    if any(eqn.params["mesh"].shape != mesh.shape for eqn in _regions(site)):
        raise RouteRefused("it stands in a shard_map over another mesh")
    if not site.eqn.params["decode_shardings"]:
        raise RouteRefused("its partition() asks for XLA's own shardings (decode_shardings=False)")
    if len(set(mesh.axis_types)) > 1:
        raise RouteRefused("the mesh has both Auto and Explicit axes")
    operands, results = _avals(site.eqn.invars), _avals(site.eqn.outvars)
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in (*operands, *results)):
        raise RouteRefused("one of its values is a PRNG key")
    if any(aval.weak_type for aval in results):
        raise RouteRefused("one of its results is weakly typed")


def _check_lowering(
    lower: Callable[..., Any], site: EquationPlace, taken: CallLayout, mesh: Mesh
) -> None:
    """Traces it on blocks, as the compiler would before it believes what partition() returned."""
    eqn = site.eqn
    blocks = _blocks(eqn.invars, taken.operands, mesh)
    wanted = _blocks(eqn.outvars, taken.results, mesh)
    axis_env = list(mesh.shape.items())
    traced = jax.make_jaxpr(lower, axis_env=axis_env)(*eqn.params["in_tree"].unflatten(blocks))
    made = [(aval.shape, aval.dtype) for aval in traced.out_avals]
    if made != [(block.shape, block.dtype) for block in wanted]:
        names = [", ".join(map(_short, values)) for values in (traced.out_avals, wanted)]
        raise RouteRefused(f"its lowering gives {names[0]} where its partition() says {names[1]}")
    if traced.consts and any(around.primitive.name == "remat2" for around in site.around):
        raise RouteRefused(
            "its lowering captures arrays, and jax.checkpoint around it cannot hold them"
        )


def _check_types(made: Route, eqn: JaxprEqn) -> None:
    """Traces the route inside of a shard_map that checks types, as the one around it does."""

    def types_only(*operands: jax.Array) -> None:
        made(eqn, list(operands))

    taken = {axis for axis in made.mesh.axis_names if axis not in made.axes}
    region = jax.shard_map(
        types_only, mesh=made.mesh, in_specs=P(), out_specs=None, axis_names=taken
    )
    try:
        jax.make_jaxpr(region)(*_shapes(eqn.invars, [P()] * len(eqn.invars), made.mesh))
    except ValueError as error:
        first = str(error).partition("\n")[0].rstrip(":")
        raise RouteRefused(f"check_vma=True of the shard_map around it: {first}") from error


def _as_varying(x: jax.Array, var: Var) -> jax.Array:
    """Typed like the result that it stands for: the body may leave out an operand that varies."""
    missing = _compat.varying_axes(var.aval) - _compat.varying_axes(jax.typeof(x))
    return _compat.to_varying(x, sorted(missing)) if missing else x


def _shapes(atoms: Sequence[Atom], specs: Sequence[P], mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Whole arrays, and how they lie."""
    return [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))
        for aval, spec in zip(_avals(atoms), specs, strict=True)
    ]


def _blocks(atoms: Sequence[Atom], specs: Sequence[P], mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """What one device holds of them."""
    blocks = []
    for aval, spec in zip(_avals(atoms), specs, strict=True):
        sizes = zip(aval.shape, _cuts(spec, mesh), strict=True)
        blocks.append(jax.ShapeDtypeStruct([size // cut for size, cut in sizes], aval.dtype))
    return blocks


def _specs(
    shardings: Sequence[Any], atoms: Sequence[Atom], mesh: Mesh, axes: Sequence[str]
) -> tuple[P, ...]:
    """What partition() returned, as specs for shard_map."""
    specs = []
    for sharding, aval in zip(shardings, _avals(atoms), strict=True):
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise RouteRefused(
                "its partition() returns shardings that are not NamedShardings of the mesh"
            )
        spec, shape = sharding.spec, aval.shape
        if P.UNCONSTRAINED in spec or spec.unreduced:
            raise RouteRefused(f"its partition() returns {spec}, which shard_map has no word for")
        if not set(axes_of(spec)) <= set(axes):
            raise RouteRefused(
                f"its partition() returns {spec}, inside a shard_map over the same axis"
            )
        spec = full(spec, len(shape))
        if any(size % cut for size, cut in zip(shape, _cuts(spec, mesh), strict=True)):
            raise RouteRefused(f"{spec} does not cut the shape {shape} into equal blocks")
        specs.append(spec)
    return tuple(specs)


def _cuts(spec: P, mesh: Mesh) -> Iterator[int]:
    """Into how many blocks each dimension is cut."""
    return (math.prod(mesh.shape[axis] for axis in _entry_axes(entry)) for entry in spec)


def _typed(atoms: Sequence[Atom]) -> tuple[P, ...]:
    return tuple(full(aval.sharding.spec, len(aval.shape)) for aval in _avals(atoms))


def _avals(atoms: Sequence[Atom]) -> list[Any]:
    return [atom.aval for atom in atoms]


def _short(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _entry_axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _is_explicit(mesh: Mesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _written(spec: P) -> str:
    return "P(" + ", ".join(map(repr, spec)) + ")"
