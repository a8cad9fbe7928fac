"""Edits of arguments of mapped calls, of what places arrays on devices, and of what reads them."""

import ast
from typing import Any

from jax_dist.lint.model import scopes, stacking
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

    def _put_replicated(
        self, at: ast.expr, mapped: Pmapped, operand: str, source: ast.expr | None
    ) -> NewCall:
        """Return `jax.device_put(operand, NamedSharding(mesh, P()))`."""
        # Several processes can put no array on one mesh that is committed to a device, as those of
        # a checkpoint are. So one that is restored goes by way of the host.
        _, bindings = self._module.scope(at).lookup(getattr(source, "id", "")) or (None, [])
        calls = [x.value for x in bindings if isinstance(x.value, ast.Call)]
        if any("restore" in scopes.last_name(call.func) for call in calls):
            operand = f"{self._writer.import_name('jax.device_get', at)}({operand})"
        sharding = self._plan.replicated(at, mapped)
        return NewCall(self._writer.import_name("jax.device_put", at), [operand, sharding])

    def _put_sharded(self, at: ast.expr, mapped: Pmapped, operand: str) -> NewCall:
        """Return `jax.make_array_from_process_local_data(sharded, operand)`."""
        name = self._writer.import_name("jax.make_array_from_process_local_data", at)
        return NewCall(name, [self._plan.sharded(at, mapped), operand])

    def edit_call(self, mapped: Pmapped, call: ast.Call) -> None:
        """Place the arguments of a call of a mapped function on its mesh."""
        # If it returns one replicated array, `unreplicate(f(x))` or `f(x)[0]` becomes `f(x)`.
        is_tuple = mapped.tuple_length is not None
        is_replicated = self._layouts.results[mapped, 0] is Layout.REPLICATED
        self._edit_arguments(mapped, call)
        outer: Any = self._module.parent(call)
        change = self._changes.find_unreplicate(outer)
        if change is not None and change.operand is call and is_replicated and not is_tuple:
            self._edit_unreplicate(Use("unreplicate", outer, call, to_host=change.to_host))

    def _edit_arguments(self, mapped: Pmapped, call: ast.Call) -> None:
        """Edit `step(state, batch=b)` to `step(state, make_array_from_...(sharded, b))`."""
        nodes = mapped.arguments(call)
        old_texts = [*map(self._writer.text, nodes)]
        new = [self._make_argument(mapped, *item, call) for item in enumerate(nodes)]
        if new != old_texts or call.keywords:
            self._writer.replace_arguments(call, new)

    def put_shared_states(self, mapped: Pmapped) -> None:
        """Insert `state = device_put(state, ...)` above pmap for a state with `in_axes` None."""
        # Only for `state = step(state)`, where the function around defines `state` further above.
        module, at = self._module, mapped.site.node
        (start, _), bindings = module.span(at), module.scope(at).bindings.items()
        above = {n for n, bound in bindings for b in bound if module.span(b.node)[0] < start}
        states: dict[str, ast.expr] = {}
        for call in mapped.calls:
            if module.scope(call) is module.scope(at):
                new = {module.text(target) for target, _ in self._variables.find_targets(call)}
                for node, axis in zip(mapped.arguments(call), mapped.in_axes, strict=True):
                    if axis is None and module.text(node) in new & above:
                        states[module.text(node)] = node
        for name, node in states.items():
            variable, column = self._variables.find(node), len(self._writer.indent(at))
            put = self._put_replicated(at, mapped, name, node)
            self._writer.insert_above(at, [self._writer.assignment(name, put, column)])
            for use in variable.uses if variable else ():
                names = (x for x in ast.walk(use.node) if isinstance(x, ast.Name | ast.Attribute))
                if stacking.HOST_LOCAL_TO_GLOBAL in map(module.qualified_name, names):
                    self._writer.remove_comment_above(use.node)
                    self._edit_unreplicate(use)  # it is a global array already

    def _make_argument(
        self, mapped: Pmapped, position: int, argument: ast.expr, call: ast.Call
    ) -> Expression:
        """Return an argument as the new program passes it: `x`, or `place(x)`."""
        # If the variable `x` has no other use, insert a statement `x = place(x)` above instead.
        text, placed = self._writer.text(argument), self._put(mapped, position, argument)
        if not isinstance(placed, NewCall) or not self._can_be_rebound(argument, call):
            return placed or text
        column = len(self._writer.indent(argument))
        self._writer.insert_above(argument, [self._writer.assignment(text, placed, column)])
        return text

    def _put(self, mapped: Pmapped, position: int, argument: ast.expr) -> "Expression | None":
        """Return the code that places an argument on the mesh; None if it stays as it is."""
        # Of `shard(x)` or `replicate(x)`, which gave `x` the axis that pmap needed, it places `x`.
        variable, change = self._variables.find(argument), self._changes.find(argument)
        is_plain_jit = mapped in self._plan.plain_jits
        is_placed = variable is not None and self._is_placed_at_definition(variable)
        is_result = argument in self._plan.mapped_by_call and not is_plain_jit  # of another call
        if is_placed or is_result or not mapped.is_mapped(position):
            return None
        operand = self._writer.text(argument if change is None else change.operand)
        if is_plain_jit and change is not None and change.kind is Kind.KEYS:  # `split(x, n)`
            return operand  # jit itself puts a key on all devices
        match self._layouts.arguments[mapped, position]:
            case Layout.REPLICATED:
                # Variables are placed where they are defined, the items of a tuple one by one.
                return change and self._put_replicated(argument, mapped, operand, change.operand)
            case Layout.SHARDED:
                return self._put_sharded(argument, mapped, operand)
            case Layout.STACKED:  # `[devices, rows, ...]`; jit gets `[devices * rows, ...]`
                text = self._writer.text(argument)
                if is_plain_jit:
                    text = f"jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), {text})"
                return self._put_sharded(argument, mapped, text)

    def _can_be_rebound(self, argument: ast.expr, call: ast.Call) -> bool:
        """Return whether `x = place(x)` may stand above a call: the call is the only use of `x`."""
        # Not if the innermost loop around the call does not set `x`: each iteration would place it.
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
        """Return whether to put a variable on the devices at its definitions, not at each call."""
        # A STACKED one, `[devices, ...]` as for pmap, only if calls that shard it by shard_map are
        # its only uses, and its definitions are expressions, which a new call can be put around.
        layout = self._layouts.of_variable[variable]
        is_readable = all(is_read(definition.node) for definition in variable.definitions)
        if layout is Layout.SHARDED:
            return is_readable  # the target of a loop is not
        if layout is Layout.REPLICATED or "result" in variable.kinds():
            return True
        for use in variable.uses:
            mapped = use.mapped_call and self._plan.mapped_by_call[use.mapped_call]
            if not mapped or mapped in self._plan.plain_jits or not mapped.is_mapped(use.position):
                return False
        return is_readable

    def edit_variables(self) -> None:
        """Write the edits of all definitions and reads of variables."""
        layouts = self._layouts.of_variable
        # Those that keep the device axis come last: an expression that defines one, and is put in
        # a call as a whole, may hold reads of the others, which need edits of their own.
        for variable in sorted(self._variables.all, key=lambda x: layouts[x] is Layout.STACKED):
            parts = (*variable.uses, *variable.definitions)
            calls = [part.mapped_call for part in parts if part.mapped_call is not None]
            users = {self._plan.mapped_by_call[call] for call in calls}
            mapped = next((x for x in self._plan.mapped_functions if x in users), None)
            if mapped is None:
                continue
            for definition in variable.definitions:  # which put it on the mesh of that function
                self._edit_definition(variable, mapped, definition)
            if layouts[variable] is Layout.REPLICATED:
                is_donated = self._is_donated(variable)
                for use in variable.uses:
                    self._edit_use(use, is_donated=is_donated)
            if layouts[variable] is not Layout.STACKED:
                self.touched |= {part.node for part in parts}

    def edit_split_iterators(self) -> None:
        """Remove `reshape((n, -1))` and `prefetch_to_device` of batches that calls now shard."""
        for iterators in filter(self._layouts.drops_split, self._variables.split_iterators):
            self._writer.remove_comment_above(iterators.split)
            self._writer.replace_around(iterators.split, iterators.operand)
            for prefetch in iterators.prefetches:
                self._edit_unreplicate(Use("unreplicate", prefetch, prefetch.args[0]))

    def _is_donated(self, variable: Variable) -> bool:
        """Return whether a mapped call may delete the arrays of a variable, by donate_argnums."""
        mapped_by_call, uses = self._plan.mapped_by_call, variable.uses
        calls = [(use.mapped_call, use.position) for use in uses if use.mapped_call is not None]
        return any(mapped_by_call[call].donates(position) for call, position in calls)

    def _edit_definition(self, variable: Variable, mapped: Pmapped, definition: Definition) -> None:
        """Edit what defines a variable, so that it has its layout in the new program."""
        # `x = replicate(w)` becomes `x = device_put(w, replicated)`, `keys = split(key, n)` becomes
        # `keys = key`, and `x = unknown(w)` becomes `x = unstacked(unknown(w), replicated)`, with a
        # helper. `shard(w)`, and a `w` that keeps the device axis, are put on the mesh as sharded.
        node: Any = definition.node
        layout, kind = self._layouts.of_variable[variable], definition.kind
        match layout, kind:
            case Layout.REPLICATED, "replicate":
                self._replaced.add(node)
                call = self._put_replicated(node, mapped, HOLE, definition.operand)
                self._writer.wrap(node, call, definition.operand)
            case Layout.REPLICATED, "keys":
                self._edit_unreplicate(Use("unreplicate", node, definition.operand))
            case Layout.REPLICATED, "unknown":
                self._replaced.add(node)
                self._writer.helpers[_UNSTACKED.format(unit=self._writer.unit)] = None
                sharding = self._plan.replicated(node, mapped)
                self._writer.wrap(node, NewCall("unstacked", [HOLE, sharding]))
            case Layout.SHARDED, _ if self._is_placed_at_definition(variable):
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

    def _edit_use(self, use: Use, *, is_donated: bool) -> None:
        """Edit one read of a replicated variable `x`, which has no device axis any longer."""
        # Unknown code gets `stacked(x)`, the copies of pmap. `is_donated`: a call deletes `x`.
        module, writer = self._module, self._writer
        if use.kind == "unreplicate":
            self._edit_unreplicate(use, is_donated=is_donated)
        elif use.kind == "metric":  # `xs.append(x)`: `get_metrics(xs)` becomes `stack_forest(...)`
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
        """Edit `unreplicate(x)` or `x[0]` to `x`, and remove a statement `x = unreplicate(x)`."""
        # If the call may give NumPy arrays (`use.to_host`), it becomes `device_get(x)`. If a mapped
        # call donates `x`, `y = unreplicate(x)` becomes `y = tree.map(jnp.copy, x)`.
        node, operand, writer = use.node, use.operand, self._writer
        self._replaced.add(node)
        statement = self._module.parent(node)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names = [self._module.text(target) for target in targets]
        is_same_name = names == [self._module.text(operand)]
        if use.to_host:
            device_get = writer.import_name("jax.device_get", node)
            writer.replace_around(node, operand, f"{device_get}(", ")")
        elif is_same_name:
            writer.remove(statement)
        elif is_donated and len(names) == 1 and not is_same_name:
            tree_map = writer.import_name("jax.tree.map", node)
            copy = writer.import_name("jax.numpy.copy", node)
            writer.replace_around(node, operand, f"{tree_map}({copy}, ", ")")
        else:
            writer.replace_around(node, operand)
