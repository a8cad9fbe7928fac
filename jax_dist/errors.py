"""Errors and warnings of the package.

Each class derives from the built-in one that JAX or Python raises for the same mistake. None has an
`__init__` of its own: errors travel between processes, so they must unpickle.
"""

import os

__all__ = (
    "ArgumentError",
    "ArgumentTypeError",
    "CacheWarning",
    "CapturedArrayWarning",
    "CompilationError",
    "DeviceCountError",
    "DisagreementError",
    "DonationError",
    "MappedAxisError",
    "MemoryGrowthError",
    "RecompileError",
    "TransferError",
)


class MappedAxisError(ValueError):
    """The arguments of a mapped function do not fit its mapped axis, or where it is called."""


class ArgumentError(ValueError):
    """An argument has a value that the function cannot take."""


class ArgumentTypeError(TypeError):
    """An argument of a mapped function is no array, or one of `pmap` not what it should be."""


class DeviceCountError(ValueError):
    """The mapped axis does not fit the devices."""


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


def display_path(path: str) -> str:
    """Return a path relative to the current directory if it is below it."""
    here = os.path.relpath(path)
    return path if here.startswith(os.pardir) else here
