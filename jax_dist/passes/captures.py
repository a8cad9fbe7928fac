"""Captured arrays (JXD401): what a function takes from around it, and bakes into its program."""

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_dist.errors import message
from jax_dist.passes.baked import Baked, Identity, array_identity, baked_arrays
from jax_dist.passes.interpreter import Values
from jax_dist.passes.naming import Found, Kind, find_names
from jax_dist.passes.operands import RULES, Substitution
from jax_dist.passes.units import human_bytes

_UNNAMED = Found("<derived>", "", "", None, None)


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """An array that a program holds, and where it comes from."""

    name: str  # as the user would type it: "params['w']"; "<derived>" if `fun` does not reach it
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    captured_at: str  # "train.py:10", where the function begins that captures it; "" if unknown
    used_at: str  # "train.py:12", the first equation that reads it; "" if it is only returned
    is_key: bool  # whether it is a random key, of the new kind or the old
    refused: str  # why it cannot be lifted; "" if it can
    key: Hashable = dataclasses.field(repr=False, compare=False)  # equal for equal NumPy arrays
    value: Any = dataclasses.field(repr=False, compare=False)  # a NumPy one shares user's memory
    origin: Any = dataclasses.field(repr=False, compare=False)  # the user's object, or `value`
    read: Callable[[], Any] | None = dataclasses.field(repr=False, compare=False)  # it is now

    def without_value(self) -> "Capture":
        """What there is to say of it, without the array."""
        return dataclasses.replace(self, value=None)


def find_captures(jaxpr: ClosedJaxpr, fun: Callable) -> tuple[Capture, ...]:
    """Every array that is baked into a program, at any depth, each once, in program order.

    Args:
      jaxpr: of `fun`, on some arguments.
      fun: what the user wrote; the names are searched from here.
    """
    baked = baked_arrays(jaxpr)
    names = find_names(fun, {identity: array.value for identity, array in baked.items()})
    return tuple(_capture(array, names.get(key, _UNNAMED)) for key, array in baked.items())


def _capture(baked: Baked, found: Found) -> Capture:
    value = baked.value
    is_old_key = baked.first_use is not None and baked.first_use.primitive.name == "random_wrap"
    return Capture(
        name=found.name,
        kind=found.kind,
        shape=tuple(value.shape),
        dtype=str(value.dtype),
        bytes=int(value.nbytes),
        captured_at=found.captured_at,
        used_at=baked.used_at,
        is_key=is_old_key or jnp.issubdtype(value.dtype, jax.dtypes.prng_key),
        refused=_refusal(baked),
        key=_key(value),
        value=value,
        origin=value if found.origin is None else found.origin,
        read=found.read,
    )


def _key(value: Any) -> Hashable:
    """A NumPy array by its content, for its owner may write to it; a jax array by identity."""
    if isinstance(value, jax.Array):
        return id(value)
    content = np.ascontiguousarray(value)
    digest = hashlib.blake2b(content.data.cast("B") if content.size else b"").digest()
    return digest, content.shape, content.dtype.str


def _refusal(baked: Baked) -> str:
    for primitive in baked.within:
        if primitive not in RULES:
            return f"it sits in the body of '{primitive}', which takes no more operands"
    return ""


def evaluate_lifted(
    jaxpr: ClosedJaxpr, captures: Sequence[Capture], values: Sequence[Any], args: Sequence[Any]
) -> Values:
    """Evaluates a program with other values in the place of its captured arrays.

    Called while tracing, with tracers as values, it gives the program with the arrays as operands.

    Args:
      jaxpr: the program.
      captures: those to replace, of this program.
      values: one for each capture, of the same shape and dtype.
      args: one for each input of the program.

    Returns:
      The results of the program, flat.
    """
    given: dict[Identity, Any] = {}
    for capture, value in zip(captures, values, strict=True):
        if value.shape != capture.shape or str(value.dtype) != capture.dtype:
            raise AssertionError(f"'{capture.name}' is replaced by {jax.typeof(value)}")
        given[array_identity(capture.value)] = value
    return Substitution(frozenset(given)).evaluate(jaxpr, args, given)


def warning_text(captures: Sequence[Capture], fun_name: str, *, kept_because: str = "") -> str:
    """One text for all captures of a call.

    Args:
      captures: at least one.
      fun_name: of the user's function.
      kept_because: why the arrays stay in the program; "" if they are lifted.
    """
    total = human_bytes(sum(capture.bytes for capture in captures))
    count = "an array" if len(captures) == 1 else f"{len(captures)} arrays"
    remedy = (
        f"They stay in the program, because {kept_because}. Pass them as arguments."
        if kept_because
        else "They are arguments of the program now. To do without this, pass them yourself."
    )
    return message(
        what=f"JXD401: '{fun_name}' captures {count}",
        which=[_description(capture) for capture in captures],
        why=f"what is captured becomes part of the program: {total} that are compiled slowly, and "
        "are part of the cache key, so that another value needs another compilation",
        do=remedy,
    )


def _description(capture: Capture) -> str:
    shape = ",".join(map(str, capture.shape))
    parts = [
        f"{capture.name}: {capture.dtype}[{shape}], {human_bytes(capture.bytes)}",
        f"{capture.kind} of {capture.captured_at}" if capture.captured_at else "",
        f"used at {capture.used_at}" if capture.used_at else "",
        f"not lifted: {capture.refused}" if capture.refused else "",
    ]
    return ", ".join(part for part in parts if part)
