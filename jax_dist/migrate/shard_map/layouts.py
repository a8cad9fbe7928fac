"""Layouts: which variables lose the device axis, the leading dimension that pmap maps over.

The search starts with all variables that are replicated, or returned by mapped functions, as
REPLICATED. It falls back to STACKED, which is always right, where a definition or read does not
fit, until nothing changes.
"""

import ast
import enum
from collections.abc import Sequence

from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map import flow
from jax_dist.migrate.shard_map.mappings import Pmapped
from jax_dist.migrate.shard_map.split_iterators import SplitIterators
from jax_dist.migrate.shard_map.variables import Definition, Variable, Variables

_MAX_UNKNOWN_READS = 6  # that get a call each; with more, the axis stays


class Layout(enum.Enum):
    """Layout of an array on the devices in the new program."""

    REPLICATED = "replicated"  # P(): each device has all of it
    SHARDED = "sharded"  # P(axis): each device has some rows of a batch
    STACKED = "stacked"  # P(axis): as pmap has it, `[devices, ...]`


class Layouts:
    """The layouts of the variables, arguments and results of a file's mapped functions."""

    def __init__(self, module: Module, mapped_functions: Sequence[Pmapped], variables: Variables):
        self._module, self._variables = module, variables
        self._mapped_functions = mapped_functions
        self.of_variable: dict[Variable, Layout] = {x: self._initial(x) for x in variables.all}
        self.arguments: dict[tuple[Pmapped, int], Layout] = {}  # by position
        self.results: dict[tuple[Pmapped, int], Layout] = {}  # by index
        while self._update():
            pass

    def _initial(self, variable: Variable) -> Layout:
        """Return the layout of a variable by its own definitions and uses alone."""
        kinds = {self._definition_kind(definition) for definition in variable.definitions}
        uses = [use.kind for use in variable.uses]
        if kinds in ({"shard"}, {"split"}) and set(uses) <= {"argument"}:
            return Layout.SHARDED  # a batch for mapped functions alone
        if kinds == {"result"} and set(uses) <= {"unreplicate", "metric"}:
            return Layout.REPLICATED  # a result such as a loss, of which one copy is read
        # A training state: replicated, then updated by mapped functions or `state = f(state)`.
        if "replicate" not in kinds or not kinds <= {"replicate", "result", "unknown"}:
            return Layout.STACKED
        unknown = [x.node for x in variable.definitions if x.kind == "unknown"]
        is_updated = all(_takes(node, variable) for node in unknown)
        is_followed = is_updated and uses.count("unknown") <= _MAX_UNKNOWN_READS
        return Layout.REPLICATED if is_followed else Layout.STACKED

    def _definition_kind(self, definition: Definition) -> str:
        """Return the kind of a definition, such as "result" for `x = step(y)`."""
        # It is "replicate" also for `pmap(init)(replicate(y))`: equal arguments give equal results.
        call = definition.mapped_call
        for mapped in self._mapped_functions:
            if call is not None and call in mapped.calls:
                arguments = mapped.mapped_arguments(call)
                if arguments and all(map(self._is_replicated, arguments)):
                    return "replicate"
        return definition.kind

    def _is_replicated(self, node: ast.expr) -> bool:
        """Return whether an argument is `replicate(x)`, or a variable with no other definition."""
        variable, change = self._variables.find(node), self._variables.changes.find(node)
        if variable is not None:
            return variable.kinds() == {"replicate"}
        return change is not None and change.kind is Kind.REPLICATED

    def _update(self) -> bool:
        """Derive the layouts of arguments, results and variables anew; False if none changed."""
        # Variables change to STACKED only, never back: so the updates come to an end.
        before = dict(self.of_variable), dict(self.arguments), dict(self.results)
        for mapped in self._mapped_functions:
            for position, axis in enumerate(mapped.in_axes):
                if position not in mapped.static_argnums:
                    nodes = [mapped.arguments(call)[position] for call in mapped.calls]
                    layout = Layout.REPLICATED if axis is None else self._common_layout(nodes)
                    self.arguments[mapped, position] = layout
            for index in range(mapped.result_count):
                self.results[mapped, index] = self._result_layout(mapped, index)
        for mapped in self._mapped_functions:
            for call in mapped.calls:
                self._stack_arguments(mapped, call)
                self._stack_targets(mapped, call)
        self._stack_unequal_elements()
        self._stack_unequal_batches()
        return before != (self.of_variable, self.arguments, self.results)

    def layout_of(self, node: ast.expr) -> Layout:
        """Return the layout of an argument: of its variable, or of the call that makes it."""
        # `replicate(x)` makes it REPLICATED, `shard(batch)` SHARDED. It is STACKED if that is
        # unknown, and if it is a tuple or dict whose elements have several layouts.
        elements = [*flow.elements_of(self._module, node)]
        if elements != [node]:  # a tuple or dict
            return self._common_layout(elements)
        variable = self._variables.find(node)
        if variable is not None:
            return self.of_variable[variable]
        change = self._variables.changes.find(node)
        if change is not None and change.kind is Kind.SPLIT:
            return Layout.SHARDED
        is_replicated = change is not None and change.kind is Kind.REPLICATED
        return Layout.REPLICATED if is_replicated else Layout.STACKED

    def _common_layout(self, nodes: Sequence[ast.expr]) -> Layout:
        """Return the layout that all expressions have; STACKED if they differ."""
        layouts = {*map(self.layout_of, nodes)}
        return layouts.pop() if len(layouts) == 1 else Layout.STACKED

    def _result_layout(self, mapped: Pmapped, index: int) -> Layout:
        """Return REPLICATED if only one copy is read of what each call returns; else STACKED."""
        # `loss` of `state, loss = step(state)` is the result at index 1.
        axes = mapped.out_axes
        is_shared = axes is None or (isinstance(axes, tuple) and axes[index] is None)
        if is_shared or all(self._reads_one_copy(mapped, call, index) for call in mapped.calls):
            return Layout.REPLICATED
        return Layout.STACKED

    def _reads_one_copy(self, mapped: Pmapped, call: ast.Call, index: int) -> bool:
        """Return whether the program reads only one device's copy of a result of a call."""
        # The index is 1 for `loss` of `state, loss = step(state)`, and 0 for a single result.
        targets = [*self._variables.find_targets(call)]  # [(state, 0), (loss, 1)]
        if not targets:
            parent = self._module.parent(call)
            if isinstance(parent, ast.Expr):  # a statement `step(x)`: nothing reads the result
                return True
            change = self._variables.changes.find_unreplicate(parent)  # `unreplicate(step(x))`
            return change is not None and change.operand is call and mapped.tuple_length is None
        for target, target_index in targets:
            gets_tuple = target_index is None  # as `results = step(state)`
            if gets_tuple or target_index == index:
                variable = self._variables.find(target)
                if variable is None or self.of_variable[variable] is not Layout.REPLICATED:
                    return False
                if gets_tuple and _may_be_tuple(variable):
                    return False  # `results[0]` is a copy, or the first result
        return True

    def _stack_arguments(self, mapped: Pmapped, call: ast.Call) -> None:
        """Make the variables in a call's arguments STACKED if the function takes another layout."""
        # An argument with `in_axes` None goes to each device as it is. If it holds copies of a
        # value, one for each device, all of them go: the variable has to keep this dimension.
        for position, argument in enumerate(mapped.arguments(call)):
            if position in mapped.static_argnums:
                continue
            elements = flow.elements_of(self._module, argument)
            for variable in filter(None, map(self._variables.find, elements)):
                must_stack = self.of_variable[variable] is not self.arguments[mapped, position]
                if mapped.in_axes[position] is None:  # for which the argument is REPLICATED
                    must_stack = not must_stack and "replicate" in variable.kinds()
                if must_stack:
                    self.of_variable[variable] = Layout.STACKED

    def _stack_targets(self, mapped: Pmapped, call: ast.Call) -> None:
        """Make the variables that get a call's results STACKED if those have another layout."""
        for target, index in self._variables.find_targets(call):
            variable = self._variables.find(target)
            layout = self.results.get((mapped, index or 0), Layout.STACKED)
            if variable is not None and self.of_variable[variable] is not layout:
                self.of_variable[variable] = Layout.STACKED

    def _stack_unequal_elements(self) -> None:
        """Make `a` and `b` of `unreplicate((a, b))` STACKED unless both are REPLICATED."""
        # `unreplicate` is removed or it stays: one call cannot do so for `a` alone.
        for variable in self._variables.all:
            for use in variable.uses:
                if use.kind == "unreplicate" and use.operand is not None:
                    elements = [*flow.elements_of(self._module, use.operand)]
                    is_replicated = self._common_layout(elements) is Layout.REPLICATED
                    if len(elements) > 1 and not is_replicated:
                        self.of_variable[variable] = Layout.STACKED

    def _stack_unequal_batches(self) -> None:
        """Make the batches of split iterators STACKED unless all of them are SHARDED."""
        for iterators in self._variables.split_iterators:
            if not self.drops_split(iterators):
                batches = filter(None, map(self._variables.of_definition.get, iterators.batches))
                self.of_variable |= dict.fromkeys(batches, Layout.STACKED)

    def drops_split(self, iterators: SplitIterators) -> bool:
        """Return whether all batches of iterators are SHARDED, so that the program splits none."""
        batches = map(self._variables.of_definition.get, iterators.batches)
        return all(x is not None and self.of_variable[x] is Layout.SHARDED for x in batches)


def _takes(node: ast.AST, variable: Variable) -> bool:
    """Return whether an expression is `f(x)` or `x.f(...)` for a variable `x`."""
    is_call = isinstance(node, ast.Call)
    operands = [*node.args, getattr(node.func, "value", None)] if is_call else []
    return any(use.node in operands for use in variable.uses)


def _may_be_tuple(variable: Variable) -> bool:
    """Return whether a read is `x[0]`, as of a tuple; in `x["w"][0]`, the 0 is of an array."""
    firsts = [x for x in variable.uses if x.kind == "unreplicate"]
    items = [x.operand for x in firsts if isinstance(x.node, ast.Subscript)]
    return not all(isinstance(operand, ast.Subscript) for operand in items)
