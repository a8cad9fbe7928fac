"""Edits of arguments of mapped calls, of what places values on devices, and of what reads them."""

import ast
from collections.abc import Sequence
from typing import Any

from jax_dist.lint.findings import Edit
from jax_dist.migrate.shard_map.expressions import list_reads, parts_of
from jax_dist.migrate.shard_map.layouts import Layout
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.plan import Plan
from jax_dist.migrate.shard_map.text import HOLE, Call
from jax_dist.migrate.shard_map.values import Definition, Use, Value

_PLACE_BATCH = "jax.make_array_from_process_local_data"
# Code that is not followed may change the copies of a value, one for each device. These functions
# give it the stacked copies that pmap would, and take them back without making them equal.
_STACKED = '''
def stacked(tree):
{unit}"""Return what the devices of this process hold of each array, stacked."""
{unit}return jax.tree.map(
{unit}    lambda x: {numpy}.stack([shard.data for shard in x.addressable_shards]), tree
{unit})
'''
_UNSTACKED = '''
def unstacked(tree, sharding):
{unit}"""Give each device of this process its slice of each array, as its copy of the whole."""

{unit}def place(x):
{unit}{unit}copies = jax.device_put(list(x), sharding.mesh.local_devices)
{unit}{unit}return jax.make_array_from_single_device_arrays(x.shape[1:], sharding, copies)

{unit}return jax.tree.map(place, tree)
'''


class Placements:
    """Writes the edits that place the values of mapped functions on devices, and that read them.

    A WHOLE value is replicated, ROWS are a sharded batch, SLICES keep the device axis of pmap.
    """

    def __init__(self, plan: Plan):
        self._plan, self._module, self._writer = plan, plan.module, plan.writer
        self._values, self._layouts, self._changes = plan.values, plan.layouts, plan.values.changes
        # Definitions and reads of the values that lose the device axis.
        self.touched: set[ast.AST] = set()
        self._replaced: set[ast.AST] = set()

    # --- calls

    def write_calls(self, mapped: Mapped) -> None:
        """Place the arguments of all calls of a mapped function; `f(x)[0]` becomes `f(x)`.

        A value that is placed where it is defined needs nothing at the call.
        """
        for call in mapped.calls:
            self._write_arguments(mapped, call)
            outer: Any = self._module.parent(call)
            first = self._changes.find_first(outer)
            is_one_result = mapped.results is None
            is_whole = is_one_result and self._layouts.results[mapped, 0] is Layout.WHOLE
            if first and first.of is call and is_whole:
                self._write_first_copy(Use("first", outer, call, to_host=first.to_host))

    def _write_arguments(self, mapped: Mapped, call: ast.Call) -> None:
        """Edit `step(state, batch=b)` to `step(state, make_array_from_...(sharded, b))`."""
        arguments = mapped.arguments(call)
        placements = [
            self._placement(mapped, position, argument, call)
            for position, argument in enumerate(arguments)
        ]
        if not any(placements) and not call.keywords:
            return
        texts = [
            self._module.text(argument)
            if placement is None
            else placement[0].fill(self._module.text(placement[1]))
            for argument, placement in zip(arguments, placements, strict=True)
        ]
        function = self._module.text(call.func)
        text = self._writer.render(Call(function, texts), call)
        start = self._module.span(call.func)[1]
        edit = Edit(start, self._module.span(call)[1], text[len(function) :])
        self._writer.edits.append(edit)

    def _placement(
        self, mapped: Mapped, position: int, argument: ast.expr, call: ast.Call
    ) -> tuple[Call, ast.expr] | None:
        """Return the call that places an argument on the devices; None if it needs none here.

        It needs none if it is not mapped, or is placed at its definition or in a statement above.
        The call has a HOLE for the text of the expression that is returned with it: the argument,
        or `x` of `replicate(x)`.
        """
        if not mapped.is_mapped(position):
            return None
        value, stacked = self._values.find(argument), self._changes.find(argument)
        if value is not None and self._is_placed_at_definition(value):
            return None
        layout = self._layouts.arguments.get((mapped, position))
        if layout is Layout.WHOLE:
            # `step(replicate(x))`; a tuple of such calls has an edit for each of them.
            is_tree = [*parts_of(self._module, argument)] != [argument]
            if value is not None or stacked is None or is_tree:
                return None
            sharding = self._plan.replicated(argument, mapped)
            put = self._writer.name("jax.device_put", argument)
            return Call(put, [HOLE, sharding]), stacked.of
        inner = stacked.of if layout is Layout.ROWS and stacked is not None else argument
        place = self._writer.name(_PLACE_BATCH, argument)
        sharding, local = self._plan.sharded(argument, mapped), HOLE
        if mapped in self._plan.reductions and layout is Layout.SLICES:
            # The function gets the whole batch, whose rows stand in one dimension.
            local = f"jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), {HOLE})"
        placing = Call(place, [sharding, local])
        if inner is argument and self._can_be_rebound(argument, call):
            text = self._module.text(argument)
            column = len(self._writer.indent(argument))
            line = self._writer.assignment(text, placing.fill(text), column)
            self._writer.above(argument, [line])
            return None
        return placing, inner

    def _can_be_rebound(self, argument: ast.expr, call: ast.Call) -> bool:
        """Return whether `x = place(x)` may stand above a call: it is the only use of `x`.

        Not if a loop around the call does not set `x`: it would place `x` in each iteration.
        """
        module, value = self._module, self._values.find(argument)
        statement = module.statement(call)
        is_plain = isinstance(argument, ast.Name) and isinstance(statement, ast.Assign | ast.Expr)
        if value is None or not is_plain or len(value.uses) != 1:
            return False
        loops = [a for a in module.ancestors(statement) if isinstance(a, ast.For | ast.While)]
        return not loops or all(module.is_inside(d.node, loops[0]) for d in value.definitions)

    def _is_placed_at_definition(self, value: Value) -> bool:
        """Return whether to put a value on the devices at its definition, not at each call."""
        if self._layouts.of_value[value] is not Layout.SLICES or _has_results(value):
            return True
        if not all(_is_expression(definition.node) for definition in value.definitions):
            return False  # a parameter or a loop variable: no expression to put a call around
        for use in value.uses:
            mapped = self._plan.mapped_of[use.call] if use.call else None
            if mapped is None or mapped in self._plan.reductions:
                return False
            if not mapped.is_mapped(use.position):
                return False
        return True

    # --- definitions

    def write_values(self) -> None:
        """Write the edits of all definitions and reads of values."""
        # Slices last: what defines them may hold reads of the other values.
        is_sliced = lambda value: self._layouts.of_value[value] is Layout.SLICES
        for value in sorted(self._values.all, key=is_sliced):
            calls = {part.call for part in (*value.uses, *value.definitions) if part.call}
            mapped = next((f for f in self._plan.mapped if not calls.isdisjoint(f.calls)), None)
            layout = self._layouts.of_value[value]
            if mapped is None:
                continue
            if layout is not Layout.SLICES:
                self.touched |= {part.node for part in (*value.uses, *value.definitions)}
            for definition in value.definitions:
                self._write_definition(value, mapped, definition)
            if layout is Layout.WHOLE:
                calls = [(use, use.call) for use in value.uses if use.call is not None]
                is_donated = any(
                    self._plan.mapped_of[call].donates(use.position) for use, call in calls
                )
                for use in value.uses:
                    self._write_use(use, is_donated=is_donated)

    def _write_definition(self, value: Value, mapped: Mapped, definition: Definition) -> None:
        """Edit what defines a value: `replicate(w)` becomes `device_put(w, replicated)`."""
        node: Any = definition.node
        layout, kind = self._layouts.of_value[value], definition.kind
        if layout is Layout.WHOLE and kind == "replicate":
            stacked = self._changes.find(node)
            if stacked is not None and self._mark_replaced(node):
                put = self._writer.name("jax.device_put", node)
                sharding = self._plan.replicated(node, mapped)
                self._writer.put_around(node, Call(put, [HOLE, sharding]), stacked.of)
        elif layout is Layout.WHOLE and kind == "unknown":
            if self._mark_replaced(node):
                self._writer.below[_UNSTACKED.format(unit=self._writer.unit)] = None
                sharding = self._plan.replicated(node, mapped)
                self._writer.put_around(node, Call("unstacked", [HOLE, sharding]))
        elif layout is Layout.ROWS and kind == "rows":
            self._write_placed(mapped, node, definition.of)
        elif layout is Layout.SLICES and _is_expression(node):
            is_made_here = kind == "keys" or not _has_results(value)
            if is_made_here and self._is_placed_at_definition(value):
                self._write_placed(mapped, node, node)

    def _write_placed(self, mapped: Mapped, node: Any, local: Any) -> None:
        """Edit `shard(b)`, the node, to `make_array_from_...(sharded, b)`; `b` is `local`."""
        nested = {*ast.walk(node), *self._module.ancestors(node)}
        if nested.isdisjoint(self._replaced) and self._mark_replaced(node):
            place = self._writer.name(_PLACE_BATCH, node)
            call = Call(place, [self._plan.sharded(node, mapped), HOLE])
            self._writer.put_around(node, call, local)

    def _mark_replaced(self, node: ast.AST) -> bool:
        """Mark an expression as replaced; return False if it was before."""
        is_first = node not in self._replaced
        self._replaced.add(node)
        return is_first

    # --- reads

    def _write_use(self, use: Use, *, is_donated: bool) -> None:
        """Edit one read of a value without device axis: `other(x)` becomes `other(stacked(x))`."""
        module, writer = self._module, self._writer
        if use.kind == "first" and use.of is not None:
            self._write_first_copy(use, is_donated=is_donated)
        elif use.kind == "listed":  # `xs.append(x)`, where get_metrics takes first copies
            append: Any = module.parent(use.node)
            for read in list_reads(module, append.func.value) or ():
                if self._mark_replaced(read):
                    stack = module.text(read.func).replace("get_metrics", "stack_forest")
                    get = writer.name("jax.device_get", read)
                    writer.replace(read, f"{stack}({get}({module.text(read.args[0])}))")
        elif use.kind == "unknown" and self._mark_replaced(use.node):
            numpy = writer.name("numpy", module.tree)
            writer.below[_STACKED.format(unit=writer.unit, numpy=numpy)] = None
            writer.name("jax", use.node)
            writer.replace(use.node, f"stacked({module.text(use.node)})")

    def _write_first_copy(self, use: Use, *, is_donated: bool = False) -> None:
        """Write `unreplicate(x)` or `x[0]` as `x`, where `x` has no device axis any more.

        Args:
          use: the read; `use.of` is `x`.
          is_donated: whether a mapped call donates `x`, so that another name for it needs a copy.
        """
        node, array, writer = use.node, use.of, self._writer
        self._replaced.add(node)
        if use.to_host:
            writer.around(node, array, f"{writer.name('jax.device_get', node)}(", ")")
            return
        assignment = self._module.parent(node)
        if isinstance(assignment, ast.Assign) and len(assignment.targets) == 1:
            is_same_name = self._module.text(assignment.targets[0]) == self._module.text(array)
            block = self._module.parent(assignment)
            body: Sequence[ast.stmt] = getattr(block, "body", ())
            is_in_function = assignment in body and not isinstance(block, ast.Module)
            if is_same_name and is_in_function and len(body) > 1:
                writer.remove(assignment)  # `x = unreplicate(x)` would be `x = x`
                return
            if is_donated and not is_same_name:
                tree_map = writer.name("jax.tree.map", node)
                copy = f"{tree_map}({writer.name('jax.numpy.copy', node)}, "
                writer.around(node, array, copy, ")")
                return
        writer.around(node, array)


def _has_results(value: Value) -> bool:
    """Return whether a mapped call returns the value, anywhere in the file."""
    return any(definition.kind == "result" for definition in value.definitions)


def _is_expression(node: ast.AST) -> bool:
    """Return whether a node is read as an expression, so that a call can be put around it."""
    return isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
