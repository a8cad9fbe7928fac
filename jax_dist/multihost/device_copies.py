"""States of pmap's programs: each leaf holds the copies of all devices along its first dimension.

Such a state is read into a program without that dimension only if its copies are equal to the bit,
or if the caller says what to take where they differ.

Shapes: `N` is the number of devices; `*s` is the rest.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from jax_dist.errors import CheckpointError, message
from jax_dist.multihost.leaves import NUMBERS, TypedLeaf

Choice: TypeAlias = Literal["mean", "first", "keep"]

_TYPE = re.compile(r"(.+)\[([\d,]+)\]")  # as in "float32[8,3]"
_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}  # of numbers that pmap made into arrays


def choices_of(
    given: str | Mapping[str, str] | None, allowed: Sequence[str] = ("mean", "first")
) -> dict[str, str]:
    """What to take of leaves that differ, by a part of their path; the first that fits counts.

    >>> choices_of("mean")
    {'': 'mean'}

    Raises:
      ValueError: there is no such choice.
    """
    choices = {"": given} if isinstance(given, str) else dict(given or {})
    for choice in choices.values():
        if choice not in allowed:
            known = ", ".join(map(repr, allowed))
            raise ValueError(f"differing: there is no choice {choice!r}; there are {known}.")
    return choices


def check_named(choices: Iterable[str], paths: Collection[str]) -> None:
    """Raises ValueError where a choice names no leaf: it may be misspelt."""
    for part in choices:
        if not any(part in path for path in paths):
            raise ValueError(f"no leaf with a device axis has {part!r} in its path.")


def number_of_copies(saved: str, leaf: TypedLeaf) -> int:
    """How many copies of a leaf were saved; 0 if what was saved is no array of copies of it."""
    found = _TYPE.fullmatch(saved)
    if found is None or saved == leaf.type:
        return 0
    first, _, rest = found[2].partition(",")
    if isinstance(leaf.given, NUMBERS):  # a step counter that `replicate` made into an array
        kind = "" if found[1].startswith("key<") else jnp.dtype(found[1]).kind
        fits = rest == "" and kind in _KINDS[type(leaf.given)] and kind != ""
    else:
        fits = f"{found[1]}[{rest}]" == leaf.type
    return int(first) if fits else 0


def one_of_each(
    copies: Mapping[str, np.ndarray], choices: Mapping[str, str], *, where: str, option: str
) -> dict[str, np.ndarray]:
    """`[N, *s] -> [*s]`, for each leaf.

    Args:
      copies: path to copies.
      choices: what to take where they differ, from `choices_of`.
      where: the checkpoint, for the error.
      option: how the caller gives such a choice, for the error.

    Raises:
      CheckpointError: the copies of some leaves differ, and nothing was chosen for them, or their
        mean does not exist. All of them are named.
    """
    differing = {path: _differing(array) for path, array in copies.items()}
    chosen = {path: _choice(path, choices) for path, found in differing.items() if found}
    refused = {
        path: f"{path}: {differing[path]} of {len(copies[path])} copies are not like the first"
        for path, choice in chosen.items()
        if choice is None or (choice == "mean" and not _has_mean(copies[path]))
    }
    if refused:
        raise _differ(where, list(refused.values()), option)
    return {
        path: _mean(array) if chosen.get(path) == "mean" else array[0]
        for path, array in copies.items()
    }


def _choice(path: str, choices: Mapping[str, str]) -> str | None:
    return next((choice for part, choice in choices.items() if part in path), None)


def _differing(array: np.ndarray) -> int:
    """How many copies have other bits than the first; a NaN is like the same NaN."""
    rows = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
    return sum(not np.array_equal(row, rows[0]) for row in rows[1:])


def _has_mean(array: np.ndarray) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _mean(array: np.ndarray) -> np.ndarray:
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return np.asarray(array.astype(wide).mean(axis=0).astype(array.dtype))


def _differ(where: str, which: Sequence[str], option: str) -> CheckpointError:
    return CheckpointError(
        message(
            what=f"the copies in {where} differ between devices",
            which=which,
            why="the program kept one value for each device, such as batch statistics that were "
            "never averaged, or a random key; one of them alone is another state",
            do=f"Choose by {option}: mean is the average of the copies (not for integers and "
            "keys), first is the copy of the first device.",
        )
    )
