"""Layouts: which values lose the device axis, the leading dimension that pmap maps over.

The search starts with all values that are replicated, or returned by mapped functions, as WHOLE. It
falls back to SLICES, which is always right, where a definition or read does not fit, until nothing
changes.
"""

import ast
import enum
from collections.abc import Sequence

from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map.expressions import parts_of
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.values import Definition, Value, Values

_MOST_UNKNOWN = 6  # reads that get a call each; with more, the axis stays


class Layout(enum.Enum):
    """How the new program holds a value on the devices."""

    WHOLE = "whole"  # P(): each device has all of it
    ROWS = "rows"  # P(axis): rows of a batch, which the function takes as they are
    SLICES = "slices"  # P(axis): one slice for each device, as pmap has it


class Layouts:
    """The layouts of the values, arguments and results of a file's mapped functions."""

    def __init__(self, module: Module, mapped: Sequence[Mapped], values: Values):
        self._module, self._mapped, self._values = module, mapped, values
        self.of_value: dict[Value, Layout] = {x: self._first_guess(x) for x in values.all}
        self.arguments: dict[tuple[Mapped, int], Layout] = {}  # by position
        self.results: dict[tuple[Mapped, int], Layout] = {}
        while self._lower_once():
            pass

    def _first_guess(self, value: Value) -> Layout:
        """Return WHOLE (replicated), ROWS (a batch) or SLICES (stacked), by one value alone."""
        kinds = {self._kind(definition) for definition in value.definitions} - {"nothing"}
        uses = [use.kind for use in value.uses]
        # A batch: split by rows, and given to mapped functions alone.
        if kinds == {"rows"} and set(uses) <= {"argument"}:
            return Layout.ROWS
        # A state: replicated, then updated by mapped functions or by a call that gets it.
        unknown = [d for d in value.definitions if d.kind == "unknown"]
        is_state = "replicate" in kinds and kinds <= {"replicate", "result", "unknown"}
        is_followed = all(self._is_computed_from(definition, value) for definition in unknown)
        if is_state and is_followed and uses.count("unknown") <= _MOST_UNKNOWN:
            return Layout.WHOLE
        # A result, such as a loss, of which only the first copy is read.
        is_result = kinds == {"result"} and set(uses) <= {"first", "listed"}
        return Layout.WHOLE if is_result else Layout.SLICES

    def _kind(self, definition: Definition) -> str:
        """Return the kind of a definition; "replicate" if all mapped arguments of a call are.

        As in `opt_state = pmap(optimizer.init)(replicate(params))`: each device computes the same.
        """
        for mapped in self._mapped:
            if definition.call is not None and definition.call in mapped.calls:
                arguments = enumerate(mapped.arguments(definition.call))
                sliced = [node for position, node in arguments if mapped.is_mapped(position)]
                if sliced and all(map(self._is_replicated, sliced)):
                    return "replicate"
        return definition.kind

    def _is_replicated(self, node: ast.expr) -> bool:
        """Return whether an argument is `replicate(x)`, or a value with no other definition."""
        value, change = self._values.find(node), self._values.changes.find(node)
        if value is not None:
            return {definition.kind for definition in value.definitions} == {"replicate"}
        return change is not None and change.kind is Kind.REPLICATED

    def _is_computed_from(self, definition: Definition, value: Value) -> bool:
        """Return whether a definition calls with the value: `f(value)`, `value.f(...)`."""
        call = definition.node
        if not isinstance(call, ast.Call):
            return False
        parts = [*call.args, getattr(call.func, "value", None)]
        return any(use.node in parts for use in value.uses)

    def _lower_once(self) -> bool:
        """Derive all layouts again, never from SLICES back; return whether any changed."""
        before = dict(self.of_value), dict(self.arguments), dict(self.results)
        for mapped in self._mapped:
            for position, axis in enumerate(mapped.axes):
                nodes = [mapped.arguments(call)[position] for call in mapped.calls]
                layouts = {*map(self.layout_of, nodes)}
                layout = layouts.pop() if len(layouts) == 1 else Layout.SLICES  # calls differ
                if position not in mapped.static:
                    whole = Layout.WHOLE  # in_axes=None gives it to all devices
                    self.arguments[mapped, position] = whole if axis is None else layout
            for index in range(mapped.results or 1):
                self.results[mapped, index] = self._result_layout(mapped, index)
        for mapped in self._mapped:
            self._lower_values(mapped)
        self._lower_read_together()
        return before != (self.of_value, self.arguments, self.results)

    def layout_of(self, node: ast.expr) -> Layout:
        """Return an argument's layout; SLICES (stacked) if unknown, or if parts of it differ."""
        parts = [*parts_of(self._module, node)]
        if parts != [node]:
            layouts = {*map(self.layout_of, parts)}
            return layouts.pop() if len(layouts) == 1 else Layout.SLICES
        value = self._values.find(node)
        if value is not None:
            return self.of_value[value]
        stacked = self._values.changes.find(node)
        kind = None if stacked is None else stacked.kind
        return {Kind.REPLICATED: Layout.WHOLE, Kind.SPLIT: Layout.ROWS}.get(kind, Layout.SLICES)  # type: ignore[call-overload]

    def _result_layout(self, mapped: Mapped, index: int) -> Layout:
        """Return WHOLE (replicated) if all variables that get a result are; else SLICES."""
        axes = mapped.out_axes
        if axes is None or (isinstance(axes, tuple) and axes[index] is None):
            return Layout.WHOLE
        for call in mapped.calls:
            targets = [*self._values.targets(call)]
            parent = self._module.parent(call)
            if not targets and not isinstance(parent, ast.Expr):
                first = self._values.changes.find_first(parent)  # `unreplicate(f(x))`
                is_first = mapped.results is None and first is not None and first.of is call
                return Layout.WHOLE if is_first else Layout.SLICES
            for target, target_index in targets:
                if target_index not in (None, index):
                    continue
                value = self._values.find(target)
                if value is None or self.of_value[value] is not Layout.WHOLE:
                    return Layout.SLICES
                if target_index is None and _has_index(value):
                    return Layout.SLICES  # `x[0]` may be the first result of a tuple
        return Layout.WHOLE

    def _lower_values(self, mapped: Mapped) -> None:
        """Make values SLICES (stacked) if the calls of a function pass or return another layout."""
        for call in mapped.calls:
            for position, argument in enumerate(mapped.arguments(call)):
                values = map(self._values.find, parts_of(self._module, argument))
                for value in filter(None, values if position not in mapped.static else ()):
                    fits = self.of_value[value] is self.arguments[mapped, position]
                    if mapped.axes[position] is None:
                        # in_axes=None gives all stacked copies to each device: keep their axis.
                        is_stacked = any(part.kind == "replicate" for part in value.definitions)
                        fits = self.of_value[value] is not Layout.WHOLE or not is_stacked
                    if not fits:
                        self.of_value[value] = Layout.SLICES
            for target, index in self._values.targets(call):
                value = self._values.find(target)
                layout = self.results.get((mapped, index or 0), Layout.SLICES)
                if value is not None and self.of_value[value] is not layout:
                    self.of_value[value] = Layout.SLICES

    def _lower_read_together(self) -> None:
        """Make the parts of `unreplicate((a, b))` SLICES (stacked) unless all are WHOLE."""
        for value in self._values.all:
            for use in value.uses:
                if use.kind == "first" and use.of is not None:
                    parts = [*parts_of(self._module, use.of)]
                    if len(parts) > 1 and {*map(self.layout_of, parts)} != {Layout.WHOLE}:
                        self.of_value[value] = Layout.SLICES


def _has_index(value: Value) -> bool:
    """Return whether a read is `x[0]`, where x may be a tuple; `x["w"][0]` is of an array."""
    firsts = [use for use in value.uses if use.kind == "first"]
    indexed = [use for use in firsts if isinstance(use.node, ast.Subscript)]
    return any(not isinstance(use.of, ast.Subscript) for use in indexed)
