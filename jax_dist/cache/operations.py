"""What a program consists of, kept small enough to be written down and compared later.

An array inside the program becomes its type, a hash and its first numbers; everything else is kept
as text. Values are numbered as they are defined: arguments, then the results of each operation.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

CONSTANT = "stablehlo.constant"

_LONGEST = 4000  # characters of one attribute; of a longer one, the rest is hashed
_SHOWN = 3  # numbers of an array that are shown
_DIGITS = 32  # of a hash
_BUFFERED = ("DenseFPElementsAttr", "DenseIntElementsAttr")
_ELEMENTS = {"f16", "f32", "f64"} | {f"{sign}{n}" for sign in ("i", "ui") for n in (8, 16, 32, 64)}
_SPLAT = re.compile(r"dense<([^<>\[\]\"]*)>")
_FRAME = re.compile(r'"([^"]*)":(\d+):')
_LIBRARY = re.compile(r"[\\/](site|dist)-packages[\\/]|[\\/]jax_dist[\\/]")
_NO_FRAME = ("", 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program."""

    kind: str  # such as "stablehlo.add"
    attributes: tuple[tuple[str, str], ...]  # by name
    types: str  # of its results: "tensor<4xf32>, tensor<i32>"
    operands: tuple[int, ...]  # the numbers of the values
    results: tuple[int, ...]
    line: str  # of the user: "train.py:12", or ""

    def attribute(self, name: str) -> str | None:
        """The text of one attribute; None if there is none of that name."""
        return dict(self.attributes).get(name)


def operations_of(module: Any) -> tuple[Operation, ...]:
    """All operations of an MLIR module, the module itself first, in the order of its text."""
    return tuple(_Reader().read(module.operation))


class _Reader:
    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._lines: dict[Any, str] = {}

    def read(self, operation: Any) -> Iterator[Operation]:
        operands = tuple(map(self._number, operation.operands))
        yield Operation(
            kind=operation.name,
            attributes=tuple(sorted(_attributes(operation))),
            types=", ".join(str(result.type) for result in operation.results),
            operands=operands,
            results=tuple(map(self._number, operation.results)),
            line=_user_line(operation.location),
        )
        for region in operation.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    self._number(argument)
                for inner in block.operations:
                    yield from self.read(inner.operation)

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def _attributes(operation: Any) -> Iterator[tuple[str, str]]:
    if operation.name == CONSTANT:
        yield "value", _value(operation)
        return
    for name, attribute in _named(operation.attributes):
        yield from _texts(name, attribute)


def _value(operation: Any) -> str:
    """`tensor<64xf32> afb9825a.. = 1.5, 2, 0.25, ...`: its type, hash, and first numbers."""
    type_ = operation.results[0].type
    # Asked first: of a complex array, the attribute alone makes jaxlib 0.7.2 end the process and
    # 0.10.2 raise; of bfloat16, its buffer does so in 0.7.2.
    attribute = operation.attributes["value"] if str(type_.element_type) in _ELEMENTS else None
    if attribute is None or attribute.is_splat or type(attribute).__name__ not in _BUFFERED:
        text = str(operation).partition(" = ")[-1]  # what stands before it is numbered
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
        number = _SPLAT.search(text)
        return f"{type_} {digest}" + (f" = {number[1]}" if number else "")
    values = np.ascontiguousarray(memoryview(attribute))
    digest = hashlib.sha256(values.data).hexdigest()[:_DIGITS]
    shown = list(map(_number_text, values.ravel()[: _SHOWN + 1].tolist()))
    more = ", ..." if len(shown) > _SHOWN else ""
    return f"{type_} {digest} = {', '.join(shown[:_SHOWN])}{more}"


def _number_text(number: Any) -> str:
    return f"{number:.6g}" if isinstance(number, float) and math.isfinite(number) else str(number)


def _named(attributes: Any) -> Iterator[tuple[str, Any]]:
    for each in attributes:  # names in 0.10.2 and 0.12.0.1, pairs in 0.7.2
        if isinstance(each, str):
            yield each, attributes[each]
        else:
            yield each.name, each.attr


def _texts(name: str, attribute: Any) -> Iterator[tuple[str, str]]:
    """One text for each part, so that a difference has a name: `res_attrs[0].jax.result_info`."""
    kind = type(attribute).__name__
    if kind == "DictAttr":
        for key, inner in _named(attribute):
            yield from _texts(f"{name}.{key}", inner)
    elif kind == "ArrayAttr" and any(type(each).__name__ == "DictAttr" for each in attribute):
        for number, each in enumerate(attribute):
            yield from _texts(f"{name}[{number}]", each)
    else:
        yield name, _shortened(str(attribute))


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    return f"{text[:_LONGEST]}... {len(text)} characters, {digest}"


def _user_line(location: Any) -> str:
    """The innermost line that belongs to no library."""
    frames = _FRAME.findall(str(location))
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    file, line = next(iter(own or frames), _NO_FRAME)
    return f"{file}:{line}" if file else ""


def line_of(operations: Sequence[Operation], position: int) -> str:
    """The line of an operation; of a constant, that of the first operation that reads it.

    JAX says of a constant only where the jitted function was called.
    """
    operation = operations[position]
    if operation.kind == CONSTANT:
        for user in operations[position + 1 :]:
            if user.line and not set(operation.results).isdisjoint(user.operands):
                return user.line
    return operation.line
