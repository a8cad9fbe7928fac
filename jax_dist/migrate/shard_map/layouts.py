"""Layouts: which values lose the device axis.

It starts with all values that are replicated, or come out of mapped functions, and takes the layout
away from those with other reads, until nothing changes.
"""

import ast
import enum
from collections.abc import Sequence
from typing import Any

from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map.expressions import parts_of
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.values import Definition, Value, Values

_MOST_UNKNOWN = 6  # reads that get a call each; with more, the axis stays


class Layout(enum.Enum):
    """Layout of a value on the devices."""

    WHOLE = "whole"  # P(): each device has all of it
    ROWS = "rows"  # P(axis): rows of a batch, which the function takes as they are
    SLICES = "slices"  # P(axis): one slice for each device, as pmap has it


class Layouts:
    """The layouts of the values, arguments and results of a file's mapped functions."""

    def __init__(self, module: Module, mapped: Sequence[Mapped], values: Values):
        self._module, self._mapped, self._values = module, mapped, values
        self._of_value = {id(value): self._first_guess(value) for value in values.all}
        self.arguments: dict[tuple[Mapped, int], Layout] = {}  # by position
        self.results: dict[tuple[Mapped, int], Layout] = {}
        while self._is_changed():
            pass

    def of_value(self, value: Value) -> Layout:
        return self._of_value[id(value)]

    def loses_axis(self, mapped: Mapped) -> bool:
        """Return whether a mapped argument of a mapped function loses the axis."""
        return any(
            axis is not None and self.arguments.get((mapped, p)) not in (None, Layout.SLICES)
            for p, axis in enumerate(mapped.axes)
        )

    def _first_guess(self, value: Value) -> Layout:
        kinds = {self._kind(definition) for definition in value.definitions} - {"nothing"}
        unknown = [use for use in value.uses if use.kind == "unknown"]
        if kinds == {"rows"} and all(use.kind == "argument" for use in value.uses):
            return Layout.ROWS
        is_state = "replicate" in kinds and kinds <= {"replicate", "result", "unknown"}
        is_state = is_state and all(
            definition.kind != "unknown" or self._is_of_itself(definition, value)
            for definition in value.definitions
        )
        if is_state and len(unknown) <= _MOST_UNKNOWN:
            return Layout.WHOLE
        is_result = kinds == {"result"} and all(
            use.kind in ("first", "listed") for use in value.uses
        )
        return Layout.WHOLE if is_result else Layout.SLICES

    def _kind(self, definition: Definition) -> str:
        """Return the kind of a definition; a function of copies alone makes copies, too."""
        call = definition.call
        mapped = next((candidate for candidate in self._mapped if call in candidate.calls), None)
        if call is None or mapped is None:
            return definition.kind
        makers = [
            self._values.changes.of(argument)
            if (value := self._values.of(argument)) is None
            else value
            for position, argument in enumerate(mapped.arguments(call))
            if mapped.is_mapped(position)
        ]
        is_copied = bool(makers) and all(map(_makes_copies, makers))
        return "replicate" if is_copied else definition.kind

    def _is_of_itself(self, definition: Definition, value: Value) -> bool:
        """Return whether it is `f(value)` or `value.replace(...)`, by code that is not seen."""
        node: Any = definition.node
        parts = [*node.args, getattr(node.func, "value", None)] if hasattr(node, "args") else []
        return any(use.node in parts for use in value.uses)

    def _is_changed(self) -> bool:
        """Lower layouts once; return whether any was."""
        before = dict(self._of_value), dict(self.arguments), dict(self.results)
        for mapped in self._mapped:
            for position, axis in enumerate(mapped.axes):
                if position not in mapped.static:
                    self.arguments[mapped, position] = self._of_argument(mapped, position, axis)
            for index in range(mapped.results or 1):
                self.results[mapped, index] = self._of_result(mapped, index)
        for mapped in self._mapped:
            self._lower_values(mapped)
        self._lower_unpacked()
        self._lower_read_together()
        return before != (self._of_value, self.arguments, self.results)

    def _of_argument(self, mapped: Mapped, position: int, axis: int | None) -> Layout:
        layouts = {self.of_expression(mapped.arguments(call)[position]) for call in mapped.calls}
        if axis is None:
            return Layout.WHOLE
        return layouts.pop() if len(layouts) == 1 else Layout.SLICES

    def of_expression(self, node: ast.expr) -> Layout:
        """Return the layout of an argument; of a tuple or dict, that of all its parts."""
        parts = [*parts_of(self._module, node)]
        if parts != [node]:
            layouts = {self.of_expression(part) for part in parts}
            return layouts.pop() if len(layouts) == 1 else Layout.SLICES
        value = self._values.of(node)
        if value is not None:
            is_part = not isinstance(node, ast.Name) and self.of_value(value) is Layout.ROWS
            return Layout.SLICES if is_part else self.of_value(value)
        stacked = self._values.changes.of(node)
        kind = None if stacked is None else stacked.kind
        return {Kind.REPLICATED: Layout.WHOLE, Kind.SPLIT: Layout.ROWS}.get(kind, Layout.SLICES)  # type: ignore[call-overload]

    def _of_result(self, mapped: Mapped, index: int) -> Layout:
        axes = mapped.out_axes
        if axes is None or (isinstance(axes, tuple) and axes[index] is None):
            return Layout.WHOLE
        for call in mapped.calls:
            targets = [*self._values.targets(call)]
            parent = self._module.parent(call)
            if not targets and not isinstance(parent, ast.Expr):
                return Layout.SLICES if not self._takes_first(call, mapped) else Layout.WHOLE
            for target, at in targets:
                if at is not None and at != index:
                    continue
                value = self._values.of(target)
                if value is None:
                    return Layout.SLICES
                if at is None and mapped.results is not None:
                    return Layout.SLICES  # one name for all results
                if value is not None and self.of_value(value) is not Layout.WHOLE:
                    return Layout.SLICES
                if value is not None and at is None and _has_index(value):
                    return Layout.SLICES  # it may take the first result of a tuple
        return Layout.WHOLE

    def _takes_first(self, call: ast.Call, mapped: Mapped) -> bool:
        """Return whether `unreplicate(f(x))` is all that is done with a call."""
        first = self._values.changes.first(self._module.parent(call))
        return mapped.results is None and first is not None and first.of is call

    def _lower_values(self, mapped: Mapped) -> None:
        """Take the layout from values that do not fit where they go."""
        for call in mapped.calls:
            for position, argument in enumerate(mapped.arguments(call)):
                for part in parts_of(self._module, argument):
                    value = self._values.of(part)
                    if value is not None and position not in mapped.static:
                        self._lower_argument(mapped, position, value)
            for target, index in self._values.targets(call):
                value = self._values.of(target)
                layout = self.results.get((mapped, index or 0), Layout.SLICES)
                if value is not None and self.of_value(value) is not layout:
                    self._of_value[id(value)] = Layout.SLICES

    def _lower_argument(self, mapped: Mapped, position: int, value: Value) -> None:
        """Take the layout from a value that an argument has in another one."""
        layout, value_layout = self.arguments[mapped, position], self.of_value(value)
        fits = value_layout is layout
        if mapped.axes[position] is None:  # stacked copies, given to all devices
            fits = value_layout is not Layout.WHOLE or all(
                d.kind != "replicate" for d in value.definitions
            )
        if not fits:
            self._of_value[id(value)] = Layout.SLICES

    def _lower_unpacked(self) -> None:
        """Keep one layout for all that one expression defines: `a, b = replicate((a, b))`."""
        by_node: dict[ast.AST, list[Value]] = {}
        for value in self._values.all:
            for definition in value.definitions:
                if definition.kind == "replicate":
                    by_node.setdefault(definition.node, []).append(value)
        for values in by_node.values():
            if any(self.of_value(value) is not Layout.WHOLE for value in values):
                for value in values:
                    self._of_value[id(value)] = Layout.SLICES

    def _lower_read_together(self) -> None:
        """Keep one layout for all parts of `unreplicate((a, b))`."""
        for value in self._values.all:
            for use in value.uses:
                if use.kind == "first" and use.of is not None:
                    parts = [*parts_of(self._module, use.of)]
                    layouts = {self.of_expression(part) for part in parts}
                    if len(parts) > 1 and layouts != {Layout.WHOLE}:
                        self._of_value[id(value)] = Layout.SLICES


def _has_index(value: Value) -> bool:
    """Return whether `x[0]` reads a value; `x["w"][0]` is of no tuple."""
    firsts = [use for use in value.uses if use.kind == "first"]
    indexed = [use for use in firsts if isinstance(use.node, ast.Subscript)]
    return any(not isinstance(use.of, ast.Subscript) for use in indexed)


def _makes_copies(maker: object) -> bool:
    if isinstance(maker, Value):
        return {definition.kind for definition in maker.definitions} == {"replicate"}
    return getattr(maker, "kind", None) is Kind.REPLICATED
