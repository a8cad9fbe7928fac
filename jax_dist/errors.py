"""The errors and warnings that this package raises, and the one form of their text.

A message says what is wrong, which values, why it cannot be, and what to do, in that order. Each
class derives from the built-in one that JAX or Python raises for the same mistake. None has an
`__init__` of its own: errors travel between processes, so they must unpickle.
"""

import os
import typing
from collections.abc import Sequence

_E = typing.TypeVar("_E", bound=Exception)

__all__ = (
    "ArgumentError",
    "ArgumentTypeError",
    "AxesError",
    "CacheWarning",
    "CapturedArrayWarning",
    "CompilationError",
    "DeviceCountError",
    "DisagreementError",
    "DonationError",
    "MappedAxisError",
    "MemoryGrowthError",
    "PlacementError",
    "RecompileError",
    "TransferError",
    "UnsupportedError",
)


class MappedAxisError(ValueError):
    """The arguments of a mapped function do not fit its mapped axis, or where it is called."""


class AxesError(ValueError):
    """`in_axes` or `out_axes` does not fit the values that it describes."""


class ArgumentError(ValueError):
    """An argument has a value that the function cannot take."""


class ArgumentTypeError(TypeError):
    """An argument of a mapped function is no array, or one of `pmap` not what it should be."""


class DeviceCountError(ValueError):
    """The mapped axis does not fit the devices."""


class UnsupportedError(NotImplementedError):
    """What is asked has a meaning, but no way to compute it here."""


class PlacementError(ValueError):
    """An array cannot be placed as asked."""


class CapturedArrayWarning(UserWarning):
    """A traced function captures arrays, which become part of its program (JXD401)."""


class CacheWarning(UserWarning):
    """The compilation cache cannot be used as asked; the program goes on without."""


class CompilationError(RuntimeError):
    """A program whose compilation has failed in an earlier run, and is not tried again."""


class TransferError(RuntimeError):
    """An array would move between host and device, or between devices, implicitly."""


class RecompileError(RuntimeError):
    """A function would be compiled after the warm-up."""


class DonationError(RuntimeError):
    """The memory of a donated argument was not reused for the results of its function."""


class MemoryGrowthError(RuntimeError):
    """A device holds more memory at the end of a step than at its start."""


class DisagreementError(RuntimeError):
    """The processes of a job do not do the same thing, or not with the same values."""


def message(*, what: str, which: Sequence[str], why: str, do: str) -> str:
    """What is wrong, which values, why it cannot be, what to do; all texts are made here."""
    bullets = "\n".join(f"  * {line}" for line in which)
    return f"{what}:\n{bullets}\nBecause {why}.\n{do}"


def refusal(kind: type[_E], *, what: str, which: Sequence[str], why: str, do: str) -> _E:
    """An error of this class with such a text, to be raised."""
    return kind(message(what=what, which=which, why=why, do=do))


def shown(path: str) -> str:
    """A path as a user would type it: relative to where he is, if it lies below."""
    here = os.path.relpath(path)
    return path if here.startswith(os.pardir) else here
