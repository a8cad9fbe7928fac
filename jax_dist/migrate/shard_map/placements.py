"""The text of values: what mapped calls are given, where that is placed, and what reads it."""

import ast
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_dist.lint.model.findings import Edit
from jax_dist.migrate.shard_map.expressions import list_reads, parts_of
from jax_dist.migrate.shard_map.layouts import Layout
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.plan import Plan
from jax_dist.migrate.shard_map.text import Call
from jax_dist.migrate.shard_map.values import Definition, Use, Value

_PLACE_BATCH = "jax.make_array_from_process_local_data"
# With these two, each device keeps a copy of its own where copies differ.
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


class _Placed(NamedTuple):
    """A part of an argument, and the call that places it on the devices."""

    of: ast.expr
    name: str
    first: str = ""  # argument
    last: str = ""
    prefix: str = ""  # of the part, up to a parenthesis

    def call(self, text: str) -> Call:
        text = f"{self.prefix}{text})" if self.prefix else text
        return Call(self.name, [part for part in (self.first, text, self.last) if part])


class Placements:
    """Writes the values of a file that go through mapped functions."""

    def __init__(self, plan: Plan):
        self._plan, self._module, self._writer = plan, plan.module, plan.writer
        self._values, self._layouts, self._changes = plan.values, plan.layouts, plan.values.changes
        self.touched: set[ast.AST] = set()  # what defines and reads values of another form
        self._replaced: set[ast.AST] = set()

    # --- calls

    def write_calls(self, mapped: Mapped) -> None:
        """Place what the calls of a mapped function give, unless its definition is placed."""
        for call in mapped.calls:
            self._write_arguments(mapped, call)
            parent: Any = self._module.parent(call)
            first = self._changes.first(parent)
            is_whole = self._layouts.results[mapped, 0] is Layout.WHOLE
            if first and first.of is call and is_whole and mapped.results is None:
                self._write_first(Use("first", parent, call, to_host=first.to_host))

    def _write_arguments(self, mapped: Mapped, call: ast.Call) -> None:
        arguments = mapped.arguments(call)
        placed = [self._argument(mapped, *item, call) for item in enumerate(arguments)]
        if not any(placed) and not call.keywords:
            return
        inside = {node for argument in arguments for node in ast.walk(argument)}
        if inside.isdisjoint(self._edited):
            texts = [
                self._module.text(old) if new is None else new.call(self._module.text(new.of))
                for old, new in zip(arguments, placed, strict=True)
            ]
            function = self._module.text(call.func)
            text = self._writer.render(Call(function, texts), call)
            start = self._module.span(call.func)[1]
            edit = Edit(start, self._module.span(call)[1], text[len(function) :])
            self._writer.edits.append(edit)
            return
        for old, new in zip(arguments, placed, strict=True):
            if new is not None:
                before, behind = new.call("\0").flat().split("\0")
                self._writer.around(old, new.of, before, behind)
        for word in call.keywords:
            start = self._module.span(word)[0]
            self._writer.edits.append(Edit(start, self._module.span(word.value)[0], ""))

    @functools.cached_property
    def _edited(self) -> set[ast.AST]:
        """Return the expressions that have edits of their own."""
        firsts = {use.node for value in self._values.all for use in value.uses if use.of}
        return {*firsts, *self._plan.mapped_of, *(fun.site.node for fun in self._plan.mapped)}

    def _argument(
        self, mapped: Mapped, position: int, argument: ast.expr, call: ast.Call
    ) -> _Placed | None:
        """Return how an argument is placed; None if it stays."""
        layout = self._layouts.arguments.get((mapped, position))
        is_tree = [*parts_of(self._module, argument)] != [argument]
        value = self._values.of(argument)
        if not mapped.is_mapped(position) or (is_tree and layout is Layout.WHOLE):
            return None
        if value is not None and self._is_placed_at_definition(value):
            return None
        stacked = self._changes.of(argument)
        if layout is Layout.WHOLE:
            if value is not None or stacked is None:
                return None
            sharding = self._plan.replicated(argument, mapped)
            put = self._writer.name("jax.device_put", argument)
            return _Placed(stacked.of, put, last=sharding.flat())
        inner = stacked.of if layout is Layout.ROWS and stacked is not None else argument
        place = self._writer.name(_PLACE_BATCH, argument)
        sharded, flattened = self._plan.sharded(argument, mapped), ""
        if mapped in self._plan.reductions and layout is Layout.SLICES:  # slices become rows
            flattened = "jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), "
        placed = _Placed(inner, place, sharded, prefix=flattened)
        if inner is argument and self._rebinds(argument, call):
            text = self._module.text(argument)
            self._writer.assign_above(argument, text, placed.call(text))
            return None
        return placed

    def _rebinds(self, node: ast.expr, call: ast.Call) -> bool:
        """Return whether a name may be set to what is placed, above its only use.

        Not in a loop that does not set it, which would place it again and again.
        """
        module, value = self._module, self._values.of(node)
        statement = module.statement(call)
        is_plain = isinstance(node, ast.Name) and isinstance(statement, ast.Assign | ast.Expr)
        if value is None or not is_plain or len(value.uses) != 1:
            return False
        loops = [a for a in module.ancestors(statement) if isinstance(a, ast.For | ast.While)]
        return not loops or all(module.is_inside(d.node, loops[0]) for d in value.definitions)

    def _is_placed_at_definition(self, value: Value) -> bool:
        """Return whether a value is placed where it is defined, and not where it is used."""
        if self._layouts.of_value(value) is not Layout.SLICES or _has_results(value):
            return True
        mapped_of, reductions = self._plan.mapped_of, self._plan.reductions
        if any(mapped_of[use.call] in reductions for use in value.uses if use.call):
            return False
        is_made = all(_is_expression(definition.node) for definition in value.definitions)
        return is_made and all(
            use.call is not None and mapped_of[use.call].is_mapped(use.position)
            for use in value.uses
        )

    # --- definitions

    def write_values(self) -> None:
        """Write what defines and what reads each value."""
        is_sliced = lambda value: self._layouts.of_value(value) is Layout.SLICES
        for value in sorted(self._values.all, key=is_sliced):  # those hold reads of the others
            mapped, layout = self._plan.first_mapped(value), self._layouts.of_value(value)
            if mapped is None:
                continue
            if layout is not Layout.SLICES:
                self.touched |= {use.node for use in value.uses}
                self.touched |= {definition.node for definition in value.definitions}
            for definition in value.definitions:
                self._write_definition(value, layout, mapped, definition)
            if layout is Layout.WHOLE:
                is_donated = any(
                    self._plan.mapped_of[use.call].donates(use.position)
                    for use in value.uses
                    if use.call is not None
                )
                for use in value.uses:
                    self._write_use(use, is_donated=is_donated)

    def _write_definition(
        self, value: Value, layout: Layout, mapped: Mapped, definition: Definition
    ) -> None:
        node: Any = definition.node
        if layout is Layout.WHOLE and definition.kind == "replicate":
            stacked = self._changes.of(node)
            if stacked is not None and self._is_first_edit(node):
                put = self._writer.name("jax.device_put", node)
                sharding = self._plan.replicated(node, mapped).flat()
                self._writer.wrap(node, stacked.of, put, last=sharding)
        elif layout is Layout.WHOLE and definition.kind == "unknown":
            if self._is_first_edit(node):  # other code makes stacked copies
                self._writer.below[_UNSTACKED.format(unit=self._writer.unit)] = None
                sharding = self._plan.replicated(node, mapped).flat()
                self._writer.put_around(node, Call("unstacked", ["", sharding]))
        elif layout is Layout.ROWS and definition.kind == "rows":
            self._write_placed(mapped, node, definition.of)
        elif (
            layout is Layout.SLICES
            and self._is_placed_at_definition(value)
            and _is_expression(node)
            and (definition.kind == "keys" or not _has_results(value))
        ):
            self._write_placed(mapped, node, node)

    def _write_placed(self, mapped: Mapped, node: Any, of: Any) -> None:
        """Write rows or slices of this process as part of a global array."""
        nested = {*ast.walk(node), *self._module.ancestors(node)}
        if nested.isdisjoint(self._replaced) and self._is_first_edit(node):
            place = self._writer.name(_PLACE_BATCH, node)
            self._writer.wrap(node, of, place, first=self._plan.sharded(node, mapped))

    def _is_first_edit(self, node: ast.AST) -> bool:
        """Note that an expression is written anew; return whether it was not yet."""
        is_first = node not in self._replaced
        self._replaced.add(node)
        return is_first

    # --- reads

    def _write_use(self, use: Use, *, is_donated: bool) -> None:
        if use.kind == "first" and use.of is not None:
            self._write_first(use, is_donated=is_donated)
        elif use.kind == "listed":
            call: Any = self._module.parent(use.node)
            for read in list_reads(self._module, call.func.value) or ():
                self._write_list_read(read)
        elif use.kind == "unknown" and self._is_first_edit(use.node):
            numpy = self._writer.name("numpy", self._module.tree)
            self._writer.below[_STACKED.format(unit=self._writer.unit, numpy=numpy)] = None
            self._writer.name("jax", use.node)
            self._writer.replace(use.node, f"stacked({self._module.text(use.node)})")

    def _write_list_read(self, read: Any) -> None:
        """Write `get_metrics(list)`, which takes the first copies of all in a list."""
        if self._is_first_edit(read):
            stack = self._module.text(read.func).replace("get_metrics", "stack_forest")
            get = self._writer.name("jax.device_get", read)
            self._writer.replace(read, f"{stack}({get}({self._module.text(read.args[0])}))")

    def _write_first(self, use: Use, *, is_donated: bool = False) -> None:
        """Write the first copy of a whole value as the value."""
        node, of = use.node, use.of
        if not self._is_first_edit(node):
            return
        module, before, behind = self._module, "", ""
        if use.to_host:
            before, behind = f"{self._writer.name('jax.device_get', node)}(", ")"
        parent = module.parent(node)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            is_same = module.text(parent.targets[0]) == module.text(of)
            body: Sequence[ast.stmt] = getattr(module.parent(parent), "body", ())
            if is_same and isinstance(module.parent(parent), ast.Module):
                pass
            elif is_same and len(body) > 1 and parent in body and not use.to_host:
                self._writer.remove(parent)
                return
            elif is_donated and not is_same and not use.to_host:
                tree_map = self._writer.name("jax.tree.map", node)
                before, behind = f"{tree_map}({self._writer.name('jax.numpy.copy', node)}, ", ")"
        self._writer.around(node, of, before, behind)


def _has_results(value: Value) -> bool:
    return any(definition.kind == "result" for definition in value.definitions)


def _is_expression(node: ast.AST) -> bool:
    return isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
