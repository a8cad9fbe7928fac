"""What JAX's equations say under other names in other versions, or say in no documentation.

JAX documents no parameters of primitives. `tests/test_parameters.py` lists those that are read in
this package, and looks for each of them on every version that is supported.
"""

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive


@functools.cache
def is_of_jax(primitive: Primitive) -> bool:
    """Whether a primitive is one of JAX's own: a user's may have any name.

    JAX makes them at import, and each is a global of one of its modules; there is no list of all.
    """
    return primitive in primitives_of_jax()


def name_of(eqn: JaxprEqn) -> str:
    """The name of an equation's primitive; one that no primitive of JAX has, if it is a user's."""
    name = eqn.primitive.name
    return name if is_of_jax(eqn.primitive) else f"{name} (not of jax)"


def primitives_of_jax() -> frozenset[Primitive]:
    """Those of the modules that are loaded; other modules may come."""
    return _found_in_modules(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _found_in_modules(_count: int) -> frozenset[Primitive]:
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    values = [
        value for module in modules for value in list(getattr(module, "__dict__", {}).values())
    ]
    return frozenset(value for value in values if isinstance(value, Primitive))


def has_own_keys(eqn: JaxprEqn) -> bool:
    """Whether all random keys that it takes and gives are of JAX's own implementations."""
    dtypes = {getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)}
    kinds = {each for each in dtypes if each and jnp.issubdtype(each, jax.dtypes.prng_key)}
    return kinds <= _key_types()


@functools.cache
def _key_types() -> frozenset[Any]:
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    made = [jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)) for name in names]
    return frozenset(each.dtype for each in made)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes along which a value may differ between devices, as far as its type says.

    Under `check_vma=False` the type says nothing, and this is empty. There is no default: "differs
    nowhere" would let a wrong sum through (it did: `aval.vma` was gone, and the result 42 times too
    large). `manual_axis_type`: seen in 0.10.2 and 0.12.0.1.
    """
    return aval.manual_axis_type.varying


def to_varying(value: jax.Array, axes: Sequence[Any]) -> jax.Array:
    """Type a value as if it could differ along `axes`."""
    return jax.lax.pcast(value, tuple(axes), to="varying")


def newly_manual_axes(eqn: JaxprEqn) -> frozenset[Any]:
    """Return the axes that a shard_map makes manual."""
    return frozenset(eqn.params["newly_manual_axes"])


@dataclasses.dataclass(frozen=True, slots=True)
class _ScanLayout:
    """Which inputs and outputs of a scan (and of its body, in the same order) are which."""

    constants: tuple[int, ...]
    carries_in: tuple[int, ...]
    carries_out: tuple[int, ...]


def scan_layout(params: Mapping[str, Any], inputs: int, outputs: int) -> _ScanLayout:
    """Counts in 0.10.2 (`num_consts`, `num_carry`), trees in 0.12.0.1 (`ft_in`, `ft_out`)."""
    if "ft_in" in params:
        constants, carries, _ = params["ft_in"].update(range(inputs)).unpack()
        carries_out, _ = params["ft_out"].update(range(outputs)).unpack()
        return _ScanLayout(tuple(constants), tuple(carries), tuple(carries_out))
    first, count = params["num_consts"], params["num_carry"]
    places = tuple(range(first, first + count))
    return _ScanLayout(tuple(range(first)), places, tuple(range(count)))


def scan_with_constants(params: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the parameters that count the operands of a scan, with more constants in front.

    See `scan_layout`. `ft_in` is a flat tree of (constants, carries, walked); a leaf for it comes
    from a scan that JAX has just made.
    """
    if "ft_in" not in params:
        return {"num_consts": params["num_consts"] + count}
    constants, *rest = params["ft_in"].elts
    model = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c * x, None), x, length=1))(1.0)
    (leaf, *_), kind = model.eqns[-1].params["ft_in"].elts[0].elts, type(params["ft_in"])
    return {"ft_in": kind(type(constants)(*[leaf] * count, *constants.elts), *rest)}


@functools.cache
def jit_operand_params() -> dict[str, Any]:
    """Return the parameters of a jit that hold one value for each operand, where nothing is said.

    From an equation that JAX has just made; their names: seen in 0.10.2 and 0.12.0.1.
    """
    params = jax.make_jaxpr(jax.jit(jax.lax.neg))(1.0).eqns[0].params
    return {name: params[name][0] for name in ("in_shardings", "in_layouts", "donated_invars")}


def call_of(jaxpr: ClosedJaxpr) -> JaxprEqn:
    """An equation that calls a jaxpr, as a jit does that was traced to it.

    `jax.jit` would trace again. The parameters are those of an equation that JAX has just made, in
    the same context, spread over as many operands; their names: seen in 0.10.2 and 0.12.0.1.
    """
    model = jax.make_jaxpr(jax.jit(jax.lax.neg))(1.0).eqns[0]
    ins, outs = len(jaxpr.in_avals), len(jaxpr.out_avals)
    counts = dict.fromkeys(("in_shardings", "in_layouts", "donated_invars"), ins)
    counts |= dict.fromkeys(("out_shardings", "out_layouts"), outs)
    spread = {name: (model.params[name][0],) * count for name, count in counts.items()}
    params = {**model.params, **spread, "jaxpr": jaxpr, "name": "as_it_is"}
    return model.replace(params=params, outvars=jaxpr.jaxpr.outvars, effects=jaxpr.effects)


def has_side_effects(eqn: JaxprEqn) -> bool:
    """Whether it does more than to compute: prints, calls back, writes to a reference.

    A collective has an effect, too, which only names its mesh axis: `NamedAxisEffect`, of
    `jax._src.core`; seen in 0.10.2 and 0.12.0.1. Known by name: another one counts as an effect.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def expanded(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation computes that has no body, but can be expanded to one; else None.

    From 0.10 on, `call_hi_primitive` holds an object that traces it: `_prim.expand`, of operands in
    the form `_prim.in_tree`. Outside of the axes around the equation, so that what names one is not
    expanded. Seen in 0.10.2 and 0.12.0.1.
    """
    held: Any = eqn.params.get("_prim")
    if name_of(eqn) != "call_hi_primitive" or not hasattr(held, "expand"):
        return None

    def expand(*values: Any) -> Any:
        return held.expand(*jax.tree.unflatten(held.in_tree, values))

    avals: list[Any] = [atom.aval for atom in eqn.invars]
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    try:
        return jax.make_jaxpr(expand)(*types)
    except Exception:  # noqa: BLE001  # it runs the user's functions
        return None


def is_ref(aval: Any) -> bool:
    """Whether it is the type of a reference, as kernels have: `AbstractRef` of `jax._src.state`.

    Known by name; seen in 0.10.2 and 0.12.0.1.
    """
    return type(aval).__name__ == "AbstractRef"
