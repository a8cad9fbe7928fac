"""The options of a rewriting, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from jax.sharding import Mesh

from jax_dist import errors
from jax_dist.errors import RewriteError
from jax_dist.passes.captures import Captures, Policy
from jax_dist.passes.gathers import Gathers

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
