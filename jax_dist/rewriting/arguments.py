"""The options of a rewriting, checked; and where the arguments of its program belong."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import errors
from jax_dist.errors import RewriteError
from jax_dist.passes import interpreter
from jax_dist.passes.captures import Captures, Policy
from jax_dist.passes.gathers import Gathers
from jax_dist.rewriting import remesh
from jax_dist.rewriting.pmap_sites import pmap_site

Partitioning: TypeAlias = Literal["route", "keep"]
Specs: TypeAlias = Mapping[str, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Wishes:
    """What the user wants of a rewriting."""

    mesh: Mesh | None
    policy: Policy
    gathers: Gathers
    partitioning: Partitioning
    specs: Specs | None


def checked(
    fun: object,
    *,
    mesh: Mesh | None,
    captures: Captures,
    gathers: Gathers,
    partitioning: Partitioning,
    specs: Specs | None,
    live_captures: bool,
    warn_bytes: int,
    lift_bytes: int,
) -> Wishes:
    """The wishes; raises RewriteError for what is none."""
    if not callable(fun):
        raise _wrong("fun", fun, "it is called to be traced", "Give a function.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise _wrong("mesh", mesh, "pmaps are moved onto its devices", "Give a jax.sharding.Mesh.")
    _check_one_of("captures", captures, get_args(Captures))
    _check_one_of("gathers", gathers, get_args(Gathers))
    _check_one_of("partitioning", partitioning, get_args(Partitioning))
    for name, count in (("warn_bytes", warn_bytes), ("lift_bytes", lift_bytes)):
        if not isinstance(count, int) or count < 0:
            raise _wrong(name, count, "it is a size in bytes", "Give an integer, 0 or more.")
    if specs is not None and not isinstance(specs, Mapping):
        raise _wrong(
            "specs",
            specs,
            "it says how to cut which operation",
            "Give {'name of the op': (in_specs, out_specs)}.",
        )
    if live_captures and captures != "lift":
        raise _wrong(
            "live_captures",
            live_captures,
            f"captures={captures!r} leaves arrays in the program",
            "Say captures='lift' too, or leave live_captures out.",
        )
    policy = Policy(captures, warn_bytes, lift_bytes, live_captures)
    return Wishes(mesh, policy, gathers, partitioning, specs)


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        spelled = ", ".join(map(repr, choices))
        raise _wrong(name, value, "it is none of the choices", f"Choose one of {spelled}.")


def _wrong(name: str, value: object, why: str, do: str) -> RewriteError:
    return RewriteError(
        errors.message(
            what=f"rewrite got a wrong `{name}`",
            which=[f"{name} is {value!r}"],
            why=why,
            do=do,
        )
    )


# --- arguments that lie on some devices only, put on all of the mesh


def put_on(
    mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with every array on all devices of the mesh, cut as it was where that fits.

    jit refuses a program whose arrays have unlike devices. What a pmap outside of the rewriting
    made lies on the devices of that pmap; those inside are moved to the mesh.

    Returns:
      None if nothing lies elsewhere, so that the refusal is about something else.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if _lies_elsewhere(leaf, mesh)]
    for place in places:
        leaf = leaves[place]
        leaves[place] = jax.device_put(leaf, NamedSharding(mesh, _spec_on(mesh, leaf)))
    return jax.tree.unflatten(tree, leaves) if places else None


def _lies_elsewhere(leaf: Any, mesh: Mesh) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return False
    return leaf.committed and leaf.sharding.device_set != set(mesh.devices.flat)


def _spec_on(mesh: Mesh, leaf: jax.Array) -> P:
    """Each cut dimension over an axis of as many devices; whole where there is none."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return P()
    free = dict(mesh.shape)
    return P(*[_axis_like(free, sharding.mesh, part) for part in sharding.spec])


def _axis_like(free: dict[str, int], own: Any, part: Any) -> str | None:
    names: Sequence[str] = part if isinstance(part, tuple) else (part,)
    if part is None or len(names) != 1:
        return None
    fitting = [name for name, size in free.items() if size == own.shape[names[0]]]
    if not fitting:
        return None
    chosen = names[0] if names[0] in fitting else fitting[0]
    del free[chosen]
    return chosen


# --- where arguments belong that nobody has put anywhere: where the pmaps that read them want them
#
# A state that starts on one device comes back cut over all of them. To jit that is another
# signature, so the same program is compiled twice. So what pmaps read is put in its place before
# the program is called; jit alone cannot, for it learns of the pmaps inside only while it traces.


def first_places(jaxpr: ClosedJaxpr, mesh: Mesh | None) -> dict[int, NamedSharding]:
    """The inputs that pmaps read, all in the same way.

    Args:
      jaxpr: the program, before it is rewritten.
      mesh: where pmaps are moved; None if they stay.

    Returns:
      By number of the input, how the pmaps want it to lie.
    """
    numbers = {var: number for number, var in enumerate(jaxpr.jaxpr.invars)}
    found: dict[int, set[NamedSharding]] = {}
    _collect(jaxpr.jaxpr, numbers, mesh, found)
    return {number: next(iter(wanted)) for number, wanted in found.items() if len(wanted) == 1}


def is_anywhere(leaf: Any) -> bool:
    """Whether nobody has said on which devices it should lie."""
    if isinstance(leaf, jax.Array):
        return not leaf.committed
    return isinstance(leaf, np.ndarray)


def _collect(
    jaxpr: Jaxpr,
    numbers: Mapping[Var, int],
    mesh: Mesh | None,
    found: dict[int, set[NamedSharding]],
) -> None:
    for eqn in jaxpr.eqns:
        read = _read(eqn, numbers)
        if not read:
            continue
        site = pmap_site(eqn)
        if site is not None:
            wanted = remesh.operand_shardings(site, mesh)
            for place, number in read.items():
                if wanted:
                    found.setdefault(number, set()).add(wanted[place])
        elif eqn.primitive.name == "jit":
            body = interpreter.open_jaxpr(eqn.params["jaxpr"])
            inner = {body.invars[place]: number for place, number in read.items()}
            _collect(body, inner, mesh, found)


def _read(eqn: JaxprEqn, numbers: Mapping[Var, int]) -> dict[int, int]:
    """By place among its operands, the inputs of the program."""
    return {
        place: numbers[atom]
        for place, atom in enumerate(eqn.invars)
        if isinstance(atom, Var) and atom in numbers
    }
