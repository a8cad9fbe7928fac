"""Variables that go through mapped functions: where a file defines them, and what reads them.

A variable is a set of definitions that share reads: of a name in one function, of a field of one
class, of parameters and results of functions whose callers are all in the file. Each of these has a
key, and the keys of one variable are merged. The device axis is the leading dimension of pmap.
"""

import ast
import dataclasses
from collections.abc import Collection, Hashable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from jax_dist.lint.model import functions
from jax_dist.lint.model.scopes import Binding
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map import flow
from jax_dist.migrate.shard_map.axis_changes import AxisChanges
from jax_dist.migrate.shard_map.split_iterators import find_split_iterators

DefinitionKind: TypeAlias = Literal[
    "replicate",  # x = replicate(y): copies of one value
    "shard",  # x = shard(y): a batch, split by the number of devices
    "keys",  # x = split(key, n): one for each device
    "split",  # for x in map(shard, data)
    "result",  # x = mapped_function(y)
    "unknown",
]
UseKind: TypeAlias = Literal[
    "argument",  # mapped_function(x)
    "unreplicate",  # unreplicate(x), x[0]
    "metric",  # xs.append(x), where only get_metrics reads xs
    "unknown",
]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One expression, parameter or target that gives a variable its arrays."""

    kind: DefinitionKind
    node: ast.AST  # the expression that makes it
    operand: ast.expr | None = None  # what is replicated or sharded
    mapped_call: ast.Call | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One read of a variable."""

    kind: UseKind
    node: ast.expr  # the read; of kind "unreplicate", the whole `unreplicate(x)`
    operand: ast.expr | None = None  # `x` of `unreplicate(x)`
    mapped_call: ast.Call | None = None
    position: int = 0  # in its arguments
    to_host: bool = False  # whether `unreplicate(x)` may give NumPy arrays


@dataclasses.dataclass(slots=True, eq=False)
class Variable:
    """One variable: the keys that hold it, its definitions and its uses."""

    keys: list[Hashable]
    definitions: list[Definition] = dataclasses.field(default_factory=list)
    uses: list[Use] = dataclasses.field(default_factory=list)

    def kinds(self) -> set[DefinitionKind]:
        """Return the kinds of its definitions."""
        return {definition.kind for definition in self.definitions}


class _Field(NamedTuple):
    """The key of `self.name` in a class; that of a name is the node that binds it."""

    owner: ast.ClassDef
    name: str


_KINDS: dict[Kind | None, DefinitionKind] = {
    Kind.REPLICATED: "replicate",
    Kind.SPLIT: "shard",
    Kind.KEYS: "keys",
}
# Attributes of an array itself: what is read of them is no array on the devices.
_ARRAY_ATTRIBUTES = frozenset(("shape", "dtype", "ndim", "size", "sharding", "at", "T"))


class Variables:
    """The variables of one file that the calls of its mapped functions take or return."""

    def __init__(self, module: Module, changes: AxisChanges, mapped_calls: Collection[ast.Call]):
        """Collect the variables `state`, `batch`, `loss` of `state, loss = step(state, batch)`."""
        # `mapped_calls` are these calls of mapped functions. A variable is stored by its keys, each
        # of which stands for a name in one function or for a field of one class; see `_key_of`.
        self._module, self._mapped_calls = module, frozenset(mapped_calls)
        self.changes: AxisChanges = changes
        self.split_iterators = find_split_iterators(module)
        self._split_batches = {x for iterator in self.split_iterators for x in iterator.batches}
        self._by_key: dict[Hashable, Variable] = {}
        # By the call in `a, b = replicate((a, b))`: the key of `a`, the first that it defines.
        self._key_of_call: dict[ast.AST, Hashable] = {}
        for call in mapped_calls:
            for argument in flow.arguments_of(call):
                for element in flow.elements_of(module, argument):  # `w` and `b` of `step((w, b))`
                    self._add_variable(self._strip_parts(element))
        for call in mapped_calls:
            for target, _ in self.find_targets(call):
                self._add_variable(target)
        self._merge_parts()
        self.all: list[Variable] = [*dict.fromkeys(self._by_key.values())]
        # A read that may see two bindings of its name was added for both.
        for variable in self.all:
            variable.definitions = [*{x.node: x for x in variable.definitions}.values()]
            variable.uses = [*{x.node: x for x in variable.uses}.values()]
        self.of_definition = {part.node: x for x in self.all for part in x.definitions}

    def find(self, node: ast.expr) -> Variable | None:
        """Return the variable of `x`, `self.x` or a part such as `x["w"]`; None if it has none."""
        return self._by_key.get(self._key_of(self._strip_parts(node)))

    def find_targets(self, value: ast.expr) -> Iterator[tuple[ast.expr, int | None]]:
        """Yield each target that gets a value, with the index of the item that it gets."""
        # These are `(x, 0)` and `(y, 1)` for `x, y = value`, also where that is `both = value` and
        # `x, y = both`; and `(x, None)` for `x = value`, whose `x` gets all of it.
        value = self._find_outermost(value)
        statement = self._module.parent(value)
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is not value:
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                yield from ((element, index) for index, element in enumerate(target.elts))
                continue
            reads = [*self._module.reads_of(value, getattr(target, "id", ""))]
            items = [*self.find_targets(reads[0])] if len(reads) == 1 else []  # of `x, y = both`
            is_unpacked = bool(items) and all(index is not None for _, index in items)
            yield from items if is_unpacked else [(target, None)]

    def _strip_parts(self, node: ast.expr) -> ast.expr:
        """Return `x` of `x.params["w"]`, where `x` is a name or `self.field`."""
        while isinstance(node, ast.Attribute | ast.Subscript) and self._key_of(node) is None:
            node = node.value
        return node

    def _find_outermost(self, value: ast.expr) -> ast.expr:
        """Return the call around, as `jnp.asarray(value)`, that keeps the device axis, if any."""
        call = self._module.parent(value)
        while isinstance(call, ast.expr) and self.changes.find_converted(call) is value:
            value, call = call, self._module.parent(call)
        return value

    def _key_of(self, node: ast.expr) -> Hashable | None:
        """Return the key of the variable that a name or `self.field` holds; None for others."""
        # The key of a name is the node that `Module.reaching` has for its first binding: the whole
        # statement `x = y`, but the target alone of `x, z = y` or `for x in y`.
        match node:
            case ast.Name(ctx=ast.Store()):
                parent = self._module.parent(node)
                is_statement = isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr)
                return parent if is_statement else node
            case ast.Name():
                bindings = self._module.reaching(node)
                return bindings[0].node if bindings else None
            case ast.Attribute(attr=name):
                owner = self._module.class_of_self(node)
                if owner is not None and self._module.self_attributes(owner, name, ast.Load):
                    return _Field(owner, name)
        return None

    def _add_variable(self, node: ast.expr) -> None:
        """Add the variable of a name or `self.field`: one for all bindings that a read may see."""
        keys = [self._key_of(node)]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            keys = [binding.node for binding in self._module.reaching(node) or ()]
        for key in filter(None, keys):
            self._add_key(key, getattr(node, "id", ""))
            self._merge(keys[0], key)

    def _add_key(self, key: Any, name: str) -> None:
        """Add a variable for a key, with its definitions and reads in the whole file."""
        # The key is the `_Field` of `self.name`, or else the node that binds a name in a function.
        if key in self._by_key:
            return
        self._by_key[key] = Variable([key])
        if isinstance(key, _Field):
            for target in self._module.self_attributes(key.owner, key.name, ast.Store):
                self._define_target(key, target)
            for read in self._module.self_attributes(key.owner, key.name, ast.Load):
                self._add_use(key, read)
        elif (lookup := self._module.scope(key).lookup(name)) is not None:
            scope, bindings = lookup
            for binding in bindings:
                if binding.node is key:
                    self._define_by_binding(key, binding)
            for read in self._module.reads(scope, name):
                # Other statements may bind the name as well: take only reads that may see this one.
                if any(binding.node is key for binding in self._module.reaching(read) or ()):
                    self._add_use(key, read)
                    self._add_variable(read)

    def _merge(self, key: Hashable, other: Hashable) -> None:
        """Make two keys hold the same variable: that of the first one, with all of the other's."""
        variable, merged = self._by_key[key], self._by_key[other]
        if variable is not merged:
            variable.definitions += merged.definitions
            variable.uses += merged.uses
            variable.keys += merged.keys
            self._by_key |= dict.fromkeys(merged.keys, variable)

    def _merge_with(self, key: Hashable, node: ast.expr) -> None:
        """Make the variable of a key and that of the name or field `y` one, as for `x = y`."""
        self._add_variable(node)
        self._merge(key, self._key_of(node))

    def _merge_parts(self) -> None:
        """Merge each variable with those that hold a part of it, as `p` holds `x.params`."""
        # For `f(x.params)` and `def f(p)`, the node `x.params` was stored twice: as a use of `x`
        # and as a definition of `p`, both of kind "unknown". So was the target `p` of `for name, p
        # in x.items()`. A node in both roles connects the two, and is then removed.
        key_of_part: dict[ast.AST, Hashable] = {}  # the key of `x`, by the node `x.params`
        for key, variable in self._by_key.items():
            for use in variable.uses:
                is_assigned = isinstance(self._module.parent(use.node), ast.Assign)
                if use.kind == "unknown" and not is_assigned:
                    key_of_part[use.node] = key
        for key in [*self._by_key]:
            parts = {x.node for x in self._by_key[key].definitions if x.node in key_of_part}
            for part in parts:
                self._merge(key, key_of_part[part])
            variable = self._by_key[key]
            variable.definitions = [x for x in variable.definitions if x.node not in parts]
            variable.uses = [x for x in variable.uses if x.node not in parts]

    def _define_by_binding(self, key: Hashable, binding: Binding) -> None:
        """Add the definition by a statement, target or parameter that binds a name, but `del`."""
        match binding:
            case Binding(kind="parameter", node=parameter):
                self._define_parameter(key, parameter)
            case Binding(kind="assign", node=target, value=ast.expr() as value):
                self._define(key, target, value)
            case Binding(node=target) if not isinstance(getattr(target, "ctx", None), ast.Del):
                self._define_target(key, target)

    def _define_target(self, key: Hashable, target: Any) -> None:
        """Add the definition by a target: in `a, (b, c) = value`, `a` gets item 0, `b` unknown."""
        value, path = functions.unpack_target(self._module, target) or (None, ())
        self._define(key, target, value if len(path) < 2 else None, *path[:1])

    def _define_parameter(self, key: Hashable, parameter: Any) -> None:
        """Add as definitions of `p` in `def f(p)` what the calls `f(x)` pass for it."""
        # The definition is unknown if other files may call `f`, or if a call passes `*args`.
        function: Any = self._module.parent(self._module.parent(parameter))
        calls = flow.find_all_calls(self._module, function) or ()
        arguments = [flow.argument_of(self._module, call, function, parameter) for call in calls]
        if not arguments or None in arguments:
            self._by_key[key].definitions.append(Definition("unknown", parameter))
        for argument in filter(None, arguments):
            self._define(key, argument, argument)

    def _define(self, key: Hashable, node: ast.AST, value: Any, index: Any = None) -> None:
        """Add a definition by `x = value`, or by `x, y = value`, where `x` gets item `index`."""
        # The key is that of `x`. `node` is the target or the value; it identifies the definition. A
        # value of None is unknown. If the value is a variable itself, merge `x` with it.
        definitions = self._by_key[key].definitions
        value = self._strip_conversions(value, index)
        element = functions.part_of(value, (index,)) if value and index is not None else None
        change = self.changes.find(value)  # the change of the device axis by `replicate(y)`
        if element is not None:  # `x, y = a, b`
            self._define(key, node, element)
        elif value in self._mapped_calls:  # `x = step(x)`
            definitions.append(Definition("result", node, mapped_call=value))
        elif isinstance(value, ast.Constant) and value.value is None:
            pass  # `x = None` gives it no array
        elif isinstance(value, ast.Name | ast.Attribute) and index is None and self._key_of(value):
            self._merge_with(key, value)  # `x = y`
        elif change is not None:  # `x = replicate(y)`
            kind = _KINDS.get(change.kind, "unknown")
            is_known = index is None or kind == "replicate"
            definitions.append(Definition(kind if is_known else "unknown", value, change.operand))
            # `a, b = replicate((a, b))` places both by one call: they become one variable.
            self._merge(self._key_of_call.setdefault(value, key), key)
        elif results := self._results_of_call(value, index):
            for result in results:  # `x = make()`, where `def make` is in this file
                self._define(key, result, result)
        else:
            source = value if value and index is None else node
            kind = "split" if source in self._split_batches else "unknown"
            definitions.append(Definition(kind, source, value))

    def _strip_conversions(self, value: ast.expr | None, index: int | None) -> ast.expr | None:
        """Return `x` of `jnp.asarray(x)` and other calls that keep the device axis of `x`."""
        # With an index, for `a, b = x`, return what is assigned to `x` above, if that is known.
        # Return `value` itself if this `x` is no name, field, tuple or call of a mapped function.
        operand = value
        while (inner := self.changes.find_converted(operand)) is not None:
            operand = inner
        if index is not None and isinstance(operand, ast.Name):
            operand = self._module.value(operand) or operand
        is_followed = isinstance(operand, ast.Name | ast.Attribute | ast.Tuple)
        return operand if is_followed or operand in self._mapped_calls else value

    def _results_of_call(self, value: ast.expr, index: int | None) -> list[ast.expr]:
        """Return what the function of a call `make()` may return: one item for each `return`."""
        # With an index, return this item of each tuple that it returns. [] if an item is not known,
        # or if `make` is no def of this file whose callers are all in this file.
        function = flow.called_function(self._module, value)
        if function is None or flow.find_all_calls(self._module, function) is None:
            return []
        results = flow.results_of(function)
        if index is None:
            return results
        items = [functions.part_of(result, (index,)) for result in results]
        known = [item for item in items if item is not None]
        return known if len(known) == len(items) else []

    def _add_use(self, key: Hashable, read: ast.expr) -> None:
        """Add the use of `x` by one read, or merge `x` with the variable that it is handed to."""
        # The key is that of `x`. A use of kind "unknown" is one by code that is not followed.
        module, part = self._module, self._find_part(read)
        use = self._find_known_use(part)
        if use is None:
            call, _ = flow.receiving_call(module, part)
            if call is not None and flow.only_waits(module, call):  # `block_until_ready(x)`
                return
            if part is not read:  # `x.params`: see `_merge_parts`
                use = Use("unknown", part)
            elif (item := flow.loop_item(module, read)) is not None:
                self._add_variable(item)  # of `for name, item in x.items()`
                use = Use("unknown", item)
            elif self._merge_receivers(key, read):  # `y = x`
                return
            else:
                use = Use("metric" if flow.get_metrics_calls(module, read) else "unknown", read)
        self._by_key[key].uses.append(use)

    def _find_part(self, read: ast.expr) -> ast.expr:
        """Return the part of `x` that a read takes: `x.params["w"]` of `x.params["w"][0].shape`."""
        part = read
        while True:
            match self._module.parent(part):
                case ast.Subscript(slice=ast.Constant(value=str())) as outer:
                    part = outer
                case ast.Attribute(attr=name) as outer if name not in _ARRAY_ATTRIBUTES:
                    if self._module.call_of(outer) is not None:
                        return part
                    part = outer
                case _:
                    return part

    def _find_known_use(self, part: ast.expr) -> Use | None:
        """Return the use of `x` in `mapped_function(x)`, `unreplicate(x)` or `x[0]`; else None."""
        # `part` is this `x` or a part such as `x.params`, also as an element of a tuple or dict.
        match self._module.parent(part):
            case ast.Subscript(slice=ast.Constant(value=0)) as item:
                return Use("unreplicate", item, part)
        call, argument = flow.receiving_call(self._module, part)  # the tuple, of `f((x, y))`
        if call is None:
            return None
        if call in self._mapped_calls:
            position = flow.arguments_of(call).index(argument)
            return Use("argument", part, mapped_call=call, position=position)
        change = self.changes.find_unreplicate(call)
        if change is not None and change.operand in (part, *self._module.ancestors(part)):
            return Use("unreplicate", call, change.operand, to_host=change.to_host)
        return None

    def _merge_receivers(self, key: Hashable, read: ast.expr) -> bool:
        """Merge `x` with what a read hands it to; return False if that is not followed."""
        # It is the `y` of `y = x` or `y, z = x, 1`, the parameter of `f(x)` for a def `f` of this
        # file, or, for a read `return x` in a def `f`, the `y` of each `y = f()`.
        module, value = self._module, self._find_outermost(read)
        outer: Any = module.parent(value)
        index = outer.elts.index(value) if isinstance(outer, ast.Tuple) else None
        if self._merge_targets(key, value if index is None else outer, index):
            return True
        call, _ = flow.receiving_call(module, read)
        parameter = flow.parameter_of(module, read, call)
        if parameter is not None:
            self._add_key(parameter, parameter.arg)
            self._merge(key, parameter)
            return True
        calls, index = flow.find_calls_returning(module, read)
        return bool(calls) and all(self._merge_targets(key, call, index) for call in calls)

    def _merge_targets(self, key: Hashable, value: ast.expr, index: int | None) -> bool:
        """Merge a variable with `y` of `y = value`, or of `z, y = value` for the index 1."""
        # Return False, and merge nothing, if no name or field gets the value.
        targets = [target for target, position in self.find_targets(value) if position == index]
        if not targets or None in map(self._key_of, targets):
            return False
        for target in targets:
            self._merge_with(key, target)
        return True
