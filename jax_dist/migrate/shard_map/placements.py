"""Edits of arguments of mapped calls, of what places arrays on devices, and of what reads them."""

import ast
from typing import Any

from jax_dist.lint.findings import Edit
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.review import is_read
from jax_dist.migrate.shard_map import flow
from jax_dist.migrate.shard_map.layouts import Layout
from jax_dist.migrate.shard_map.mappings import Pmapped
from jax_dist.migrate.shard_map.plan import MigrationPlan
from jax_dist.migrate.shard_map.text import HOLE, Expression, NewCall
from jax_dist.migrate.shard_map.variables import Definition, Use, Variable

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
    """Writes the edits that place the arrays of mapped functions on devices, and that read them.

    By layout: of a REPLICATED variable, `x = replicate(y)` becomes `x = device_put(y, replicated)`,
    and `unreplicate(x)` becomes `x`. SHARDED, `x = shard(y)` becomes `x = make_array_from_...(y)`.
    STACKED, `step(x)` becomes `step(make_array_from_...(x))`.
    """

    def __init__(self, plan: MigrationPlan):
        self._plan, self._module, self._writer = plan, plan.module, plan.writer
        self._variables, self._layouts = plan.variables, plan.layouts
        self._changes = plan.variables.changes
        # Definitions and reads of the variables that lose the device axis.
        self.touched: set[ast.AST] = set()
        self._replaced: set[ast.AST] = set()

    def _put_replicated(self, at: ast.expr, mapped: Pmapped, operand: str) -> NewCall:
        """Return `jax.device_put(operand, NamedSharding(mesh, P()))`."""
        sharding = self._plan.replicated(at, mapped)
        return NewCall(self._writer.import_name("jax.device_put", at), [operand, sharding])

    def _put_sharded(self, at: ast.expr, mapped: Pmapped, operand: str) -> NewCall:
        """Return `jax.make_array_from_process_local_data(sharded, operand)`."""
        name = self._writer.import_name("jax.make_array_from_process_local_data", at)
        return NewCall(name, [self._plan.sharded(at, mapped), operand])

    # --- calls

    def edit_calls(self, mapped: Pmapped) -> None:
        """Place the arguments of all calls of a mapped function; `f(x)[0]` becomes `f(x)`."""
        for call in mapped.calls:
            self._edit_arguments(mapped, call)
            outer: Any = self._module.parent(call)
            change = self._changes.find_unreplicate(outer)
            is_replicated = self._layouts.results[mapped, 0] is Layout.REPLICATED
            if mapped.tuple_length is None and is_replicated and change and change.operand is call:
                use = Use("unreplicate", outer, call, to_host=change.to_host)
                self._edit_unreplicate(use)

    def _edit_arguments(self, mapped: Pmapped, call: ast.Call) -> None:
        """Edit `step(state, batch=b)` to `step(state, make_array_from_...(sharded, b))`."""
        nodes = mapped.arguments(call)
        arguments = [self._argument(mapped, *item, call) for item in enumerate(nodes)]
        if arguments == [*map(self._module.text, nodes)] and not call.keywords:
            return
        function = self._module.text(call.func)
        text = self._writer.render(NewCall(function, arguments), call)
        (_, start), (_, end) = self._module.span(call.func), self._module.span(call)
        self._writer.edits.append(Edit(start, end, text[len(function) :]))

    def _argument(
        self, mapped: Pmapped, position: int, argument: ast.expr, call: ast.Call
    ) -> Expression:
        """Return an argument as the new program passes it: `x`, or `place(x)`.

        If the variable `x` has no other use, a statement `x = place(x)` is inserted above instead.
        """
        text, placed = self._module.text(argument), self._place(mapped, position, argument)
        if not isinstance(placed, NewCall) or not self._can_be_rebound(argument, call):
            return placed or text
        column = len(self._writer.indent(argument))
        self._writer.insert_above(argument, [self._writer.assignment(text, placed, column)])
        return text

    def _place(self, mapped: Pmapped, position: int, argument: ast.expr) -> "Expression | None":
        """Return the call that places an argument on the mesh; None if it needs none here.

        The argument is `x`, or a call such as `shard(x)` or `replicate(x)`, a `change`, which gave
        `x` the device axis that pmap needed: then `x` itself, the operand, is placed.
        """
        variable, change = self._variables.find(argument), self._changes.find(argument)
        is_placed = variable is not None and self._is_placed_at_definition(variable)
        if is_placed or not mapped.is_mapped(position):
            return None
        layout, text = self._layouts.arguments[mapped, position], self._module.text
        if mapped in self._plan.jits and change is not None and change.kind is Kind.KEYS:
            return text(change.operand)  # jit itself puts a key on all devices
        if layout is Layout.REPLICATED:
            # Variables are placed where they are defined, the items of a tuple one by one.
            is_tree = [*flow.elements_of(self._module, argument)] != [argument]
            if variable is not None or change is None or is_tree:
                return None
            return self._put_replicated(argument, mapped, text(change.operand))
        if layout is Layout.SHARDED and change is not None:
            return self._put_sharded(argument, mapped, text(change.operand))
        operand = text(argument)
        if layout is Layout.STACKED and mapped in self._plan.jits:
            # The function gets the whole batch, whose rows stand in one dimension.
            operand = f"jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), {operand})"
        return self._put_sharded(argument, mapped, operand)

    def _can_be_rebound(self, argument: ast.expr, call: ast.Call) -> bool:
        """Return whether `x = place(x)` may stand above a call: the call is the only use of `x`.

        Not if the innermost loop around the call does not set `x`: each iteration would place it.
        """
        module, variable = self._module, self._variables.find(argument)
        statement = module.statement(call)
        is_plain = isinstance(argument, ast.Name) and isinstance(statement, ast.Assign | ast.Expr)
        if variable is None or not is_plain or len(variable.uses) != 1:
            return False
        for outer in module.ancestors(statement):
            if isinstance(outer, ast.For | ast.While):
                return all(module.is_inside(x.node, outer) for x in variable.definitions)
        return True

    def _is_placed_at_definition(self, variable: Variable) -> bool:
        """Return whether to put a variable on the devices at its definitions, not at each call.

        If it is STACKED, all uses must take it so, and all definitions be expressions.
        """
        layout = self._layouts.of_variable[variable]
        if layout is not Layout.STACKED or "result" in variable.kinds():
            return True
        for use in variable.uses:
            mapped = self._plan.mapped_by_call[use.mapped_call] if use.mapped_call else None
            is_jit = mapped in self._plan.jits
            if mapped is None or is_jit or not mapped.is_mapped(use.position):
                return False
        return all(is_read(definition.node) for definition in variable.definitions)

    # --- definitions

    def edit_variables(self) -> None:
        """Write the edits of all definitions and reads of variables."""
        layouts = self._layouts.of_variable
        # Stacked ones last: what defines them may hold reads of the other variables.
        for variable in sorted(self._variables.all, key=lambda x: layouts[x] is Layout.STACKED):
            parts = (*variable.uses, *variable.definitions)
            calls = {part.mapped_call for part in parts}
            mapped_functions = (x for x in self._plan.mapped_functions if calls & {*x.calls})
            mapped = next(mapped_functions, None)  # its mesh is the one that the variable is put on
            if mapped is None:
                continue
            for definition in variable.definitions:
                self._edit_definition(variable, mapped, definition)
            is_donated = any(  # its arrays are deleted by a call
                self._plan.mapped_by_call[use.mapped_call].donates(use.position)
                for use in variable.uses
                if use.mapped_call is not None
            )
            for use in variable.uses if layouts[variable] is Layout.REPLICATED else ():
                self._edit_use(use, is_donated=is_donated)
            if layouts[variable] is not Layout.STACKED:
                self.touched |= {part.node for part in parts}

    def _edit_definition(self, variable: Variable, mapped: Pmapped, definition: Definition) -> None:
        """Edit what defines a variable: `replicate(w)` becomes `device_put(w, replicated)`."""
        node: Any = definition.node
        layout, kind = self._layouts.of_variable[variable], definition.kind
        match layout, kind:
            case Layout.REPLICATED, "replicate":
                self._replaced.add(node)
                call = self._put_replicated(node, mapped, HOLE)
                self._writer.wrap(node, call, definition.operand)
            case Layout.REPLICATED, "keys":  # `keys = split(key, n)` becomes `keys = key`
                self._edit_unreplicate(Use("unreplicate", node, definition.operand))
            case Layout.REPLICATED, "unknown":
                self._replaced.add(node)
                self._writer.helpers[_UNSTACKED.format(unit=self._writer.unit)] = None
                sharding = self._plan.replicated(node, mapped)
                self._writer.wrap(node, NewCall("unstacked", [HOLE, sharding]))
            case Layout.SHARDED, "shard":
                self._edit_sharded(mapped, node, definition.operand)
            case Layout.STACKED, _ if is_read(node):
                is_made_here = kind == "keys" or "result" not in variable.kinds()
                if is_made_here and self._is_placed_at_definition(variable):
                    self._edit_sharded(mapped, node, node)

    def _edit_sharded(self, mapped: Pmapped, node: Any, operand: Any) -> None:
        """Edit `shard(b)` to `make_array_from_...(sharded, b)`, where `operand` is the `b`."""
        nested = {*ast.walk(node), *self._module.ancestors(node)}  # must not be replaced before
        if nested.isdisjoint(self._replaced):
            self._replaced.add(node)
            self._writer.wrap(node, self._put_sharded(node, mapped, HOLE), operand)

    # --- reads

    def _edit_use(self, use: Use, *, is_donated: bool) -> None:
        """Edit one read of a replicated `x`: unknown code gets `stacked(x)`, as pmap has it."""
        module, writer = self._module, self._writer
        if use.kind == "unreplicate":
            self._edit_unreplicate(use, is_donated=is_donated)
        elif use.kind == "listed":  # `xs.append(x)`: `get_metrics(xs)` becomes `stack_forest(...)`
            for call in flow.get_metrics_calls(module, use.node):
                self._replaced.add(call)
                stack = module.text(call.func).replace("get_metrics", "stack_forest")
                get = writer.import_name("jax.device_get", call)
                writer.replace(call, f"{stack}({get}({module.text(call.args[0])}))")
        elif use.kind == "unknown":
            self._replaced.add(use.node)
            numpy = writer.import_name("numpy", module.tree)
            writer.helpers[_STACKED.format(unit=writer.unit, numpy=numpy)] = None
            writer.import_name("jax", use.node)
            writer.replace(use.node, f"stacked({module.text(use.node)})")

    def _edit_unreplicate(self, use: Use, *, is_donated: bool = False) -> None:
        """Edit `unreplicate(x)` or `x[0]` to `x`, and remove `x = unreplicate(x)`.

        `is_donated`: a mapped call donates `x`, so that another name for it needs a copy.
        """
        node, operand, writer = use.node, use.operand, self._writer
        self._replaced.add(node)
        statement, before, after = self._module.parent(node), "", ""
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names = [self._module.text(target) for target in targets]
        is_same_name = names == [self._module.text(operand)]
        if use.to_host:
            before, after = f"{writer.import_name('jax.device_get', node)}(", ")"
        elif is_same_name and self._is_removable(statement):
            writer.remove(statement)
            return
        elif is_donated and len(names) == 1 and not is_same_name:  # `y = unreplicate(x)`
            tree_map = writer.import_name("jax.tree.map", node)
            copy = writer.import_name("jax.numpy.copy", node)
            before, after = f"{tree_map}({copy}, ", ")"
        writer.replace_around(node, operand, before, after)

    def _is_removable(self, statement: ast.AST) -> bool:
        """Return whether a statement of a function is not the only one of its block."""
        block: Any = self._module.parent(statement)
        body = [] if isinstance(block, ast.Module) else block.body
        return statement in body and len(body) > 1
