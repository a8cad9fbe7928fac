"""Variables that go through mapped functions: where a file defines them, and what reads them.

A variable is a set of definitions that share reads: of a name in one function, of a field of one
class, of parameters and results of functions whose callers are all in the file. Each of these has a
key, and the keys of one variable are joined. The device axis is the leading dimension of pmap.
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

DefinitionKind: TypeAlias = Literal[
    "replicate",  # x = replicate(y): copies of one value
    "shard",  # x = shard(y): a batch, split by the number of devices
    "keys",  # x = split(key, n): one for each device
    "result",  # x = mapped_function(y)
    "unknown",
]
UseKind: TypeAlias = Literal[
    "argument",  # mapped_function(x)
    "unreplicate",  # unreplicate(x), x[0]
    "listed",  # xs.append(x), where only get_metrics reads xs
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
    """The variables of one file that the calls of its mapped functions take or return.

    Names and fields whose values go from one to the other, as in `x = y`, are one variable.
    """

    def __init__(self, module: Module, changes: AxisChanges, mapped_calls: Collection[ast.Call]):
        self._module, self._mapped_calls = module, frozenset(mapped_calls)
        self.changes: AxisChanges = changes
        self._by_key: dict[Hashable, Variable] = {}
        self._key_of_call: dict[ast.AST, Hashable] = {}  # by call of `replicate` and the like
        for call in mapped_calls:
            for argument in flow.arguments_of(call):
                for element in flow.elements_of(module, argument):
                    self._add(self._base_of(element))
        for call in mapped_calls:
            for target, _ in self.targets(call):
                self._add(target)
        self._join_parts()
        self.all: list[Variable] = [*dict.fromkeys(self._by_key.values())]
        # A read that may see two bindings of its name was added for both.
        for variable in self.all:
            variable.definitions = [*{x.node: x for x in variable.definitions}.values()]
            variable.uses = [*{x.node: x for x in variable.uses}.values()]

    def find(self, node: ast.expr) -> Variable | None:
        """Return the variable of `x`, `self.x` or a part such as `x["w"]`; None if it has none."""
        return self._by_key.get(self._key(self._base_of(node)))

    def targets(self, value: ast.expr) -> Iterator[tuple[ast.expr, int | None]]:
        """Yield `(x, 0)` and `(y, 1)` for `x, y = value`, also if `results = value` is above.

        `(x, None)` for `x = value`, whose `x` gets all of it.
        """
        value = self._find_outermost(value)
        parent = self._module.parent(value)
        if not isinstance(parent, ast.Assign | ast.AnnAssign) or parent.value is not value:
            return
        for target in parent.targets if isinstance(parent, ast.Assign) else [parent.target]:
            if isinstance(target, ast.Tuple | ast.List):
                yield from ((element, index) for index, element in enumerate(target.elts))
                continue
            reads = [*self._module.reads_of(value, getattr(target, "id", ""))]
            parts = [*self.targets(reads[0])] if len(reads) == 1 else []
            if parts and all(index is not None for _, index in parts):
                yield from parts
            else:
                yield target, None

    def _base_of(self, node: ast.expr) -> ast.expr:
        """Return `x` of `x.params["w"]`, where `x` is a name or `self.field`."""
        while isinstance(node, ast.Attribute | ast.Subscript) and self._key(node) is None:
            node = node.value
        return node

    def _find_outermost(self, value: ast.expr) -> ast.expr:
        """Return the call around, as `jnp.asarray(value)`, that keeps the device axis, if any."""
        call = self._module.parent(value)
        while isinstance(call, ast.expr) and self.changes.find_kept_operand(call) is value:
            value, call = call, self._module.parent(call)
        return value

    # --- keys

    def _key(self, node: ast.expr) -> Hashable | None:
        """Return what identifies a variable: the node that first binds a name, or a `_Field`."""
        match node:
            case ast.Name(ctx=ast.Store()):
                parent = self._module.parent(node)
                is_plain = isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr)
                return parent if is_plain else node  # as bindings have it
            case ast.Name():
                bindings = self._module.reaching(node)
                return bindings[0].node if bindings else None
            case ast.Attribute(attr=name):
                owner = self._module.class_of_self(node)
                if owner is not None and self._module.self_attributes(owner, name, ast.Load):
                    return _Field(owner, name)
        return None

    def _add(self, node: ast.expr) -> None:
        """Add the variable of a name or `self.field`: one for all bindings that a read may see."""
        keys = [self._key(node)]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            keys = [binding.node for binding in self._module.reaching(node) or ()]
        for key in filter(None, keys):
            self._add_key(key, getattr(node, "id", ""))
            self._join(keys[0], key)

    def _add_key(self, key: Any, name: str) -> None:
        """Add the variable of a key with its definitions and uses; `name` is what a node binds."""
        if key in self._by_key:
            return
        module = self._module
        self._by_key[key] = Variable([key])
        if isinstance(key, _Field):
            for target in module.self_attributes(key.owner, key.name, ast.Store):
                self._define_target(key, target)
            for read in module.self_attributes(key.owner, key.name, ast.Load):
                self._add_use(key, read)
            return
        lookup = module.scope(key).lookup(name)
        if lookup is None:
            return
        scope, bindings = lookup
        match next((binding for binding in bindings if binding.node is key), None):
            case None | Binding(node=ast.Name(ctx=ast.Del())):
                pass
            case Binding(kind="parameter", node=parameter):
                self._define_parameter(key, parameter)
            case Binding(kind="assign", node=target, value=ast.expr() as value):
                self._define(key, target, value)
            case Binding(node=target):
                self._define_target(key, target)
        for read in module.reads(scope, name):
            if any(binding.node is key for binding in module.reaching(read) or ()):
                self._add_use(key, read)
                self._add(read)

    def _join(self, key: Hashable, other: Hashable) -> None:
        """Make two keys hold the same variable: that of the first one, with all of the other's."""
        variable, joined = self._by_key[key], self._by_key[other]
        if variable is not joined:
            variable.definitions += joined.definitions
            variable.uses += joined.uses
            variable.keys += joined.keys
            self._by_key |= dict.fromkeys(joined.keys, variable)

    def _join_parts(self) -> None:
        """Join each variable with those that get a part of it: `x` with the `p` of `f(x.params)`.

        Here `f` is `def f(p)`. The node `x.params` is an unknown use of `x` and also an unknown
        definition of `p`, and so is the target `p` of `for name, p in x.items()`. The joined
        variable has neither.
        """
        key_of_part: dict[ast.AST, Hashable] = {  # the key of `x`, by the node `x.params`
            use.node: key
            for key, variable in self._by_key.items()
            for use in variable.uses
            if use.kind == "unknown" and not isinstance(self._module.parent(use.node), ast.Assign)
        }
        for key in [*self._by_key]:
            parts = {x.node for x in self._by_key[key].definitions if x.node in key_of_part}
            for part in parts:
                self._join(key, key_of_part[part])
            variable = self._by_key[key]
            variable.definitions = [x for x in variable.definitions if x.node not in parts]
            variable.uses = [x for x in variable.uses if x.node not in parts]

    # --- definitions

    def _define_target(self, key: Hashable, target: Any) -> None:
        """Add the definition by a target: in `a, (b, c) = value`, `a` gets item 0, `b` unknown."""
        value, path = functions.unpack_target(self._module, target) or (None, ())
        self._define(key, target, value if len(path) < 2 else None, *path[:1])

    def _define_parameter(self, key: Hashable, parameter: Any) -> None:
        """Add what callers pass for a parameter; unknown unless all of them are in the file."""
        function: Any = self._module.parent(self._module.parent(parameter))
        calls = flow.callers(self._module, function) or ()
        arguments = [flow.argument_of(self._module, call, function, parameter) for call in calls]
        if not arguments or None in arguments:
            self._by_key[key].definitions.append(Definition("unknown", parameter))
        for argument in filter(None, arguments):
            self._define(key, argument, argument)

    def _define(self, key: Hashable, node: ast.AST, value: Any, index: Any = None) -> None:
        """Add the definition of a key by `x = value`, or at an index by `x, y = value`.

        A value of None is unknown. `node` is the target or the value; it identifies the definition.
        """
        define = self._by_key[key].definitions.append
        value = self._skip_kept(value, index)
        element = functions.part_of(value, (index,)) if value and index is not None else None
        if element is not None:  # `x, y = a, b`
            self._define(key, node, element)
            return
        match value:
            case None:
                define(Definition("unknown", node))
            case ast.Call() if value in self._mapped_calls:  # `x = step(x)`
                define(Definition("result", node, mapped_call=value))
            case ast.Constant(value=None):  # `x = None` gives it no array
                pass
            case ast.Name() | ast.Attribute() if index is None and self._key(value) is not None:
                self._add(value)
                self._join(key, self._key(value))  # `x = y`
            case _ if (change := self.changes.find(value)) is not None:  # `x = replicate(y)`
                kind = _KINDS.get(change.kind, "unknown")
                is_known = index is None or kind == "replicate"
                define(Definition(kind if is_known else "unknown", value, change.operand))
                # All of `a, b = replicate((a, b))` are one variable: one call places them.
                self._join(self._key_of_call.setdefault(value, key), key)
            case _:
                results = self._results_of_call(value, index)
                for result in results:  # of `x = make()`
                    self._define(key, result, result)
                if not results:
                    define(Definition("unknown", value))

    def _skip_kept(self, value: ast.expr | None, index: int | None) -> ast.expr | None:
        """Return `x` of `jnp.asarray(x)`, a call that keeps the device axis of its operand.

        With an index, of `a, b = x` above, return the tuple that `x` is. If the operand is nothing
        that can be followed, return the value as it was.
        """
        inner = value
        while (operand := self.changes.find_kept_operand(inner)) is not None:
            inner = operand
        if index is not None and isinstance(inner, ast.Name):
            inner = self._module.value(inner) or inner
        is_followed = isinstance(inner, ast.Name | ast.Attribute | ast.Tuple)
        return inner if is_followed or inner in self._mapped_calls else value

    def _results_of_call(self, value: ast.expr, index: int | None) -> list[ast.expr]:
        """Return all results of a call's function, or their items at an index; [] if unknown."""
        function = flow.called_function(self._module, value)
        if function is None or flow.callers(self._module, function) is None:
            return []
        results = flow.results_of(function)
        if index is None:
            return results
        items = [functions.part_of(result, (index,)) for result in results]
        return [] if None in items else [*filter(None, items)]

    # --- uses

    def _add_use(self, key: Hashable, read: ast.expr) -> None:
        """Add the use of a variable by one read, or join the variable with what it is handed to."""
        module, part = self._module, self._part_read(read)
        use, (call, _) = self._find_known_use(part), flow.receiving_call(module, part)
        if use is None and call is not None and flow.only_waits(module, call):
            return
        if use is None and part is not read:  # see `_join_parts`
            use = Use("unknown", part)
        if use is None and (item := flow.loop_item(module, read)) is not None:
            self._add(item)
            use = Use("unknown", item)
        if use is None:
            if self._join_receivers(key, read):
                return
            use = Use("listed" if flow.get_metrics_calls(module, read) else "unknown", read)
        self._by_key[key].uses.append(use)

    def _part_read(self, read: ast.expr) -> ast.expr:
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
        """Return the use of `x` in `mapped_function(x)` or `unreplicate(x)`; None for others."""
        match self._module.parent(part):
            case ast.Subscript(slice=ast.Constant(value=0)) as item:
                return Use("unreplicate", item, part)
        call, argument = flow.receiving_call(self._module, part)
        if call is not None and call in self._mapped_calls:
            position = flow.arguments_of(call).index(argument)
            return Use("argument", part, mapped_call=call, position=position)
        change = self.changes.find_unreplicate(call)
        around = (part, *self._module.ancestors(part))  # `unreplicate((x, y))` takes a tuple
        if call is not None and change is not None and change.operand in around:
            return Use("unreplicate", call, change.operand, to_host=change.to_host)
        return None

    def _join_receivers(self, key: Hashable, read: ast.expr) -> bool:
        """Join `x` with what a read hands it to: `y = x`, `f(x)`, `return x`; False if unknown."""
        module, value, index = self._module, self._find_outermost(read), None
        outer = module.parent(value)
        if isinstance(outer, ast.Tuple):
            value, index = outer, outer.elts.index(value)
        if self._join_targets(key, value, index):
            return True
        parent = module.parent(read)
        call = module.parent(parent) if isinstance(parent, ast.keyword) else parent
        parameter = flow.parameter_of(module, read, call)
        if parameter is not None:
            self._add_key(parameter, parameter.arg)
            self._join(key, parameter)
            return True
        calls, index = flow.returned_to(module, read)
        return bool(calls) and all(self._join_targets(key, call, index) for call in calls)

    def _join_targets(self, key: Hashable, value: ast.expr, index: int | None) -> bool:
        """Join a key with the targets of a value, or of its part at an index; False if unknown."""
        targets = [target for target, at in self.targets(value) if at == index]
        keys = [self._key(target) for target in targets]
        if not targets or None in keys:
            return False
        for target, other in zip(targets, keys, strict=True):
            self._add(target)
            self._join(key, other)
        return True
