"""Notes in JSON that somebody else may have damaged or forged: read as written, or not at all.

They lie beside cache entries, and go over the connections between processes. What
is too large, too deep, of other types, or no JSON counts as not there. Nothing here loads JAX.
"""

import contextlib
import dataclasses
import enum
import errno
import functools
import json
import math
import os
import re
import stat
import types
import typing
from typing import IO, Any, TypeVar

_T = TypeVar("_T")

_LIMIT = 1 << 20  # bytes
_DEEPEST = 16  # lists and objects within one another
_LARGEST = 2**63  # no number beyond
# The end of a string may be missing, and nothing is tried twice: so it takes linear time.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def load(path: str | os.PathLike[str], kind: type[_T], *, limit: int = _LIMIT) -> _T | None:
    """The note in a file of so many bytes at most; None where there is none of this kind."""
    try:
        return parse(content(path, limit=limit), kind)
    except OSError:
        return None


def content(path: str | os.PathLike[str], *, limit: int | None = None) -> bytes:
    """The bytes of a regular file, of which there may be `limit`; links are followed.

    Raises:
      OSError: it cannot be read, is a device, pipe or folder, or is larger than `limit`.
    """
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise OSError(errno.EFBIG, f"more than {limit} bytes", os.fspath(path))
        return file.read(size)  # no more: some files of /proc have no end


def regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a regular file to be read.

    Raises:
      OSError: it cannot be read, or is a device, pipe or folder.
    """
    # A pipe without a writer would block here; on a regular file O_NONBLOCK has no effect.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(descriptor, "rb")


def parse(data: bytes, kind: type[_T]) -> _T | None:
    """The note in some bytes.

    Args:
      data: JSON in UTF-8.
      kind: a dataclass or NamedTuple, whose fields must all be there, and no others; or a type made
        of `str`, `int`, `float`, `bool`, `None`, enums, lists, tuples, unions, and dictionaries
        from strings.

    Returns:
      None where the bytes are no such note.

    >>> parse(b'{"a": [1, 2]}', dict[str, list[int]])
    {'a': [1, 2]}
    >>> parse(b'{"a": [1, "2"]}', dict[str, list[int]]) is None
    True
    """
    try:
        return read(decode(data), kind)
    except ValueError:
        return None


def read(value: Any, kind: type[_T]) -> _T | None:
    """The same for what JSON says."""
    try:
        return _read(value, kind)
    except ValueError:
        return None


def decode(data: bytes) -> Any:
    """What JSON says, of any kind.

    Raises:
      ValueError: it is no JSON in UTF-8, or nests too deep.
    """
    if _depth(data) > _DEEPEST:
        raise ValueError(f"it nests deeper than {_DEEPEST} lists and objects")
    return json.loads(data.decode(), parse_constant=_no_number)


def _depth(data: bytes) -> int:
    """How deep the brackets go; no further than is too deep."""
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(data):
        if not found[0].startswith(b'"'):
            depth += 1 if found[0] in b"[{" else -1
            deepest = max(deepest, depth)
        if deepest > _DEEPEST:
            break
    return deepest


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _read(value: Any, kind: Any) -> Any:
    """Raises a ValueError where the value is not of this kind."""
    fields = _fields(kind)
    if fields is not None:
        if not isinstance(value, dict) or value.keys() != fields.keys():
            raise ValueError("other fields")
        return kind(**{name: _read(value[name], each) for name, each in fields.items()})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for each in inner:
            with contextlib.suppress(ValueError):
                return _read(value, each)
    if origin is list and type(value) is list:
        return [_read(each, inner[0]) for each in value]
    if origin is tuple and type(value) is list:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_read(each, of) for each, of in zip(value, kinds, strict=True))
    if origin is dict and type(value) is dict:
        return {name: _read(each, inner[1]) for name, each in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float and type(value) in (int, float):
        if abs(value) >= _LARGEST or not math.isfinite(value):
            raise ValueError("no number that a program writes")
        return float(value)
    if type(value) is kind and (kind is not int or abs(value) < _LARGEST):
        return value
    raise ValueError("another type")


@functools.cache
def _fields(kind: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or NamedTuple, and their types; None for other types."""
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return typing.get_type_hints(kind)
    return None
