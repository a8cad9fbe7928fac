"""Values of a file that go through mapped functions: where they are defined, and what reads them.

A value is a set of definitions that share reads: of a variable of one function, of a field of one
class, of parameters and results of functions whose callers are all in the file. Each of these has a
key, and the keys of one value are joined. The "first copy" of `x` is `x[0]`: one of the copies that
pmap stacks along the device axis, its leading dimension.
"""

import ast
import dataclasses
import functools
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from jax_dist.lint.model import functions
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map.axis_changes import AxisChanges
from jax_dist.migrate.shard_map.expressions import (
    argument_of,
    called_function,
    callers,
    container_around,
    list_reads,
    loop_item,
    parameter_of,
    parts_of,
    results_of,
    returned_to,
    waits,
)

DefinitionKind: TypeAlias = Literal[
    "replicate",  # replicate(x): copies of one value
    "rows",  # shard(x): a batch, split by the number of devices
    "keys",  # split(key, n): one for each device
    "result",  # of a mapped call
    "nothing",  # None, or an empty list
    "unknown",
]
UseKind: TypeAlias = Literal[
    "argument",  # of a mapped call
    "first",  # x[0], unreplicate(x)
    "listed",  # put into a list that only get_metrics reads
    "unknown",
]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """One expression, parameter or target that gives a value."""

    kind: DefinitionKind
    node: ast.AST  # the expression that makes it
    of: ast.expr | None = None  # what is copied or split
    call: ast.Call | None = None  # a mapped one
    index: int | None = None  # of its results; None: all of them


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One read of a value."""

    kind: UseKind
    node: ast.expr  # the read, or the expression that takes the first copy
    of: ast.expr | None = None  # what the first copy is taken of
    call: ast.Call | None = None  # a mapped one
    position: int = 0
    to_host: bool = False  # the first copy may be one of NumPy


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """One value: the keys that hold it, its definitions and its uses."""

    keys: list[Hashable]
    definitions: list[Definition] = dataclasses.field(default_factory=list)
    uses: list[Use] = dataclasses.field(default_factory=list)


_KINDS: dict[Kind, DefinitionKind] = {
    Kind.REPLICATED: "replicate",
    Kind.SPLIT: "rows",
    Kind.KEYS: "keys",
}
# Attributes of an array itself: what is read of them is no array on the devices.
_NOT_FIELDS = frozenset(("shape", "dtype", "ndim", "size", "sharding", "at", "T"))


class Values:
    """The values of one file that the calls of its mapped functions take or return."""

    def __init__(self, module: Module, changes: AxisChanges, calls: Collection[ast.Call]):
        self._module, self._calls = module, frozenset(calls)
        self.changes: AxisChanges = changes
        self._of_key: dict[Hashable, Value] = {}  # one value for all keys that are joined
        self._key_of_call: dict[ast.AST, Hashable] = {}  # by call of `replicate` and the like
        for call in calls:
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                for part in parts_of(module, argument):
                    self._visit(self._whole(part))
        for call in calls:
            for target, _ in self.targets(call):
                self._visit(target)
        self._join_parts()
        for value in self.all:  # a read that may see two of its bindings was recorded for both
            value.definitions = [*{part.node: part for part in value.definitions}.values()]
            value.uses = [*{part.node: part for part in value.uses}.values()]

    @functools.cached_property
    def all(self) -> list[Value]:
        """All values."""
        return [*dict.fromkeys(self._of_key.values())]

    def find(self, node: ast.expr) -> Value | None:
        """Return the value of a name or `self.field`; for `x.params` or `x["w"]` that of `x`.

        None if no call of a mapped function takes or returns it.
        """
        key = self._key(self._whole(node))
        return None if key is None else self._of_key.get(key)

    def _whole(self, node: ast.expr) -> ast.expr:
        """Return `x` of `x.params["w"]`, where `x` is a name or `self.field`."""
        base = node
        while isinstance(base, ast.Attribute | ast.Subscript) and self._key(base) is None:
            base = base.value
        return base

    def targets(self, call: ast.expr) -> Iterator[tuple[ast.expr, int | None]]:
        """Yield `(target, index)` for the targets of an expression; None: it gets all parts."""
        value = self._outermost_kept(call)
        parent = self._module.parent(value)
        if not isinstance(parent, ast.Assign | ast.AnnAssign) or parent.value is not value:
            return
        for target in parent.targets if isinstance(parent, ast.Assign) else [parent.target]:
            if isinstance(target, ast.Tuple | ast.List):
                yield from ((element, index) for index, element in enumerate(target.elts))
                continue
            reads = [*self._module.reads_of(value, getattr(target, "id", ""))]
            parts = [*self.targets(reads[0])] if len(reads) == 1 else []
            if parts and all(index is not None for _, index in parts):  # `results = f(x)` above
                yield from parts
            else:
                yield target, None

    def _outermost_kept(self, node: ast.expr) -> ast.expr:
        """Return the outermost call, as `jnp.asarray`, that returns a value with the same axis."""
        while self.changes.find_unchanged(parent := self._module.parent(node)) is node:
            node = parent  # type: ignore[assignment] # only a call keeps its argument's axis
        return node

    # --- keys of names and fields, joined where they hold one value

    def _key(self, node: ast.expr) -> Hashable | None:
        """Return the node that binds a name, or ("field", class, name) of `self.name`, as key."""
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                parent = self._module.parent(node)
                is_plain = isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr)
                return parent if is_plain else node  # as bindings have it
            bindings = self._module.reaching(node)
            return bindings[0].node if bindings else None
        if isinstance(node, ast.Attribute):
            owner = self._module.class_of_self(node)
            if owner is not None:
                is_read = self._module.self_attributes(owner, node.attr, ast.Load)
                return ("field", owner, node.attr) if is_read else None
        return None

    def _join(self, key: Hashable, joined_key: Hashable) -> None:
        """Record that two keys hold the same value: both are of the first one's from now on."""
        value, joined = self._of_key[key], self._of_key[joined_key]
        if value is not joined:
            value.definitions += joined.definitions
            value.uses += joined.uses
            value.keys += joined.keys
            self._of_key |= dict.fromkeys(joined.keys, value)

    def _join_parts(self) -> None:
        """Join `x` with each parameter and loop variable that gets a part of it, as `x.params`."""
        parts: dict[ast.AST, Hashable] = {
            use.node: key
            for key, value in self._of_key.items()
            for use in value.uses
            if use.kind == "unknown" and not isinstance(self._module.parent(use.node), ast.Assign)
        }
        for key in [*self._of_key]:
            nodes = {part.node for part in self._of_key[key].definitions if part.node in parts}
            for node in nodes:
                self._join(key, parts[node])
            value = self._of_key[key]
            value.definitions = [part for part in value.definitions if part.node not in nodes]
            value.uses = [part for part in value.uses if part.node not in nodes]

    # --- definitions and uses

    def _visit(self, node: ast.expr) -> None:
        """Record the value of a name or field; all bindings that a read may see are one value."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            bindings = self._module.reaching(node) or []
            keys: list[Hashable] = [binding.node for binding in bindings]
        else:
            key = self._key(node)
            keys = [] if key is None else [key]
        for key in keys:
            if key not in self._of_key:
                self._of_key[key] = Value([key])
                self._record(key, node)
            self._join(keys[0], key)

    def _record(self, key: Hashable, node: ast.expr) -> None:
        """Record the definitions and uses of one key; `node` is a name or field that has it."""
        if isinstance(key, tuple):
            _, owner, name = key
            for target in self._module.self_attributes(owner, name, ast.Store):
                self._define_target(key, target)
            for load in self._module.self_attributes(owner, name, ast.Load):
                self._use(key, load)
            return
        module = self._module
        scope = module.scope(key)  # type: ignore[arg-type] # a node
        scope_and_bindings = scope.lookup(getattr(node, "id", ""))
        if scope_and_bindings is None:
            return
        home, bindings = scope_and_bindings
        binding = next((binding for binding in bindings if binding.node is key), None)
        if binding is not None and binding.kind == "parameter":
            self._define_parameter(key, binding.node)
        elif binding is not None and binding.kind == "assign" and binding.value is not None:
            self._define(key, binding.node, binding.value, None)
        elif binding is not None and not isinstance(getattr(binding.node, "ctx", None), ast.Del):
            self._define_target(key, binding.node)
        for load in module.reads(home, node.id):  # type: ignore[attr-defined] # a name
            if any(other.node is key for other in module.reaching(load) or ()):
                self._use(key, load)
                self._visit(load)

    def _define_target(self, key: Hashable, target: Any) -> None:
        """Record what a target gets: of `a, (b, c) = value`, `a` gets part 0, `b` is unknown."""
        value, path = functions.unpack_target(self._module, target) or (None, ())
        index: Any = path[0] if path else None
        self._define(key, target, value if len(path) < 2 else None, index)

    def _define_parameter(self, key: Hashable, parameter: Any) -> None:
        """Record what callers pass for a parameter; unknown unless all of them are in the file."""
        function = self._module.parent(self._module.parent(parameter))
        calls, arguments = None, []
        if isinstance(function, ast.FunctionDef):
            calls = callers(self._module, function) or []
            arguments = [argument_of(self._module, call, function, parameter) for call in calls]
        if not calls or any(argument is None for argument in arguments):
            self._of_key[key].definitions.append(Definition("unknown", parameter))
        for argument in filter(None, arguments):
            self._define(key, argument, argument, None)

    def _define(
        self, key: Hashable, node: ast.AST, value: ast.expr | None, index: int | None
    ) -> None:
        """Record the definition of a key by an expression, or join both if it is another name.

        `value` is the expression (None: unknown), `index` its part that is meant (None: all of it),
        and `node` the target or expression that stands for an unknown definition.
        """
        definitions = self._of_key[key].definitions
        value = self._inside_kept(value, index)
        part = functions.part_of(value, (index,)) if value and index is not None else None
        if part is not None:
            self._define(key, node, part, None)
        elif value is None:
            definitions.append(Definition("unknown", node))
        elif isinstance(value, ast.Call) and value in self._calls:
            definitions.append(Definition("result", node, call=value, index=index))
        elif isinstance(value, ast.Constant) and value.value is None:
            definitions.append(Definition("nothing", value))
        elif (
            index is None
            and self._key(value) is not None
            and isinstance(value, ast.Name | ast.Attribute)
        ):
            self._visit(value)
            self._join(key, self._key(value))
        elif (stacked := self.changes.find(value)) is not None:
            kind = _KINDS.get(stacked.kind, "unknown") if stacked.kind else "unknown"
            kind = kind if index is None or kind == "replicate" else "unknown"
            definitions.append(Definition(kind, value, stacked.of))
            # All of `a, b = replicate((a, b))` are placed by one call, so they are one value.
            self._join(self._key_of_call.setdefault(value, key), key)
        elif not self._define_by_function(key, value, index):
            definitions.append(Definition("unknown", value))

    def _inside_kept(self, value: ast.expr | None, index: int | None) -> ast.expr | None:
        """Return `x` of `jnp.asarray(x)`, which keeps the device axis of `x`; else the value."""
        inner = value
        while (kept := self.changes.find_unchanged(inner)) is not None:
            inner = kept
        if index is not None and isinstance(inner, ast.Name):
            inner = self._module.value(inner) or inner
        is_followed = isinstance(inner, ast.Name | ast.Attribute | ast.Tuple)
        return inner if is_followed or inner in self._calls else value

    def _define_by_function(self, key: Hashable, value: ast.expr, index: int | None) -> bool:
        """Define `x` of `x = make()` by what `make` returns; False if that is not in this file."""
        function = called_function(self._module, value) if isinstance(value, ast.Call) else None
        returned = None if function is None else results_of(function)
        if function is None or not returned or callers(self._module, function) is None:
            return False
        parts = [
            result if index is None else functions.part_of(result, (index,)) for result in returned
        ]
        if any(part is None for part in parts):
            return False
        for part in parts:
            self._define(key, part, part, None)  # type: ignore[arg-type] # not None
        return True

    def _use(self, key: Hashable, load: ast.expr) -> None:
        """Record what one read of a value does: passes it, takes its first copy, or is unknown."""
        module = self._module
        whole = load  # grows to `x.params["w"]`, from the read `x`
        while True:
            parent = module.parent(whole)
            if isinstance(parent, ast.Subscript) and parent.value is whole:
                index = parent.slice.value if isinstance(parent.slice, ast.Constant) else None
                if index == 0:
                    self._of_key[key].uses.append(Use("first", parent, of=whole))
                    return
                if not isinstance(index, str):
                    break
            elif (
                not isinstance(parent, ast.Attribute)
                or parent.attr in _NOT_FIELDS
                or module.call_of(parent) is not None  # a method
            ):
                break  # `x.params` is a part of the value; `x.shape` and `x.f()` are none
            whole = parent
        use = self._use_of(key, whole, load)
        if use is not None:
            self._of_key[key].uses.append(use)

    def _use_of(self, key: Hashable, whole: ast.expr, load: ast.expr) -> Use | None:
        """Return the use of a value by the read `load`, which `whole` is, or a part of it.

        None if it only waits for the value (`block_until_ready`), or if it hands the value to
        another name, parameter or result: then both are joined.
        """
        module, container = self._module, whole  # container: the outermost tuple or dict around
        while (outer := container_around(module, container)) is not None:
            container = outer
        outside = module.parent(container)
        call = module.parent(outside) if isinstance(outside, ast.keyword) else outside
        if isinstance(call, ast.Call) and call in self._calls and container is not call.func:
            arguments = [*call.args, *(word.value for word in call.keywords)]
            return Use("argument", whole, call=call, position=arguments.index(container))
        first = self.changes.find_first(outside)
        around_or_self = (whole, *module.ancestors(whole))  # `unreplicate((x, y))` takes a tuple
        if first is not None and isinstance(outside, ast.Call) and first.of in around_or_self:
            return Use("first", outside, first.of, to_host=first.to_host)
        if isinstance(call, ast.Call) and waits(module, call):
            return None
        if whole is not load:  # a part such as `x.params`: see `_join_parts`
            return Use("unknown", whole)
        if (item := loop_item(module, load)) is not None:
            self._visit(item)
            return Use("unknown", item)
        if self._join_names(key, load):
            return None
        parent = module.parent(load)
        parent = module.parent(parent) if isinstance(parent, ast.keyword) else parent
        if not isinstance(parent, ast.Call):
            return None if self._join_callers(key, load) else Use("unknown", load)
        match parent.func:  # `metrics.append(x)`, for `get_metrics(metrics)`
            case ast.Attribute(value=ast.Name() as listed, attr="append"):
                if list_reads(module, listed) is not None:
                    return Use("listed", load)
        return None if self._join_parameter(key, parent, load) else Use("unknown", load)

    def _join_names(self, key: Hashable, load: ast.expr) -> bool:
        """Join `x` with `y` for `y = x` or `y, z = x, 1`; return False for other reads of `x`."""
        outer, index = self._outermost_kept(load), None
        around = self._module.parent(outer)
        if isinstance(around, ast.Tuple):
            outer, index = around, around.elts.index(outer)
        return self._join_targets(
            key, [target for target, at in self.targets(outer) if at == index]
        )

    def _join_targets(self, key: Hashable, targets: Sequence[ast.expr]) -> bool:
        """Join a key with all targets; False, and no join, if there are none or one has no key."""
        keys = [self._key(target) for target in targets]
        if not targets or None in keys:
            return False
        for target, other in zip(targets, keys, strict=True):
            self._visit(target)
            self._join(key, other)
        return True

    def _join_parameter(self, key: Hashable, call: ast.Call, load: ast.expr) -> bool:
        """Join a key with the parameter that gets it; False if not all callers are in the file."""
        parameter = parameter_of(self._module, load, call)
        if parameter is None:
            return False
        if parameter not in self._of_key:
            self._of_key[parameter] = Value([parameter])
            self._record(parameter, ast.Name(parameter.arg, ast.Load()))
        self._join(key, parameter)
        return True

    def _join_callers(self, key: Hashable, load: ast.expr) -> bool:
        """Join a key with the targets of all calls of the function that returns it; or False."""
        calls, index = returned_to(self._module, load)
        return bool(calls) and all(
            self._join_targets(key, [target for target, at in self.targets(call) if at == index])
            for call in calls
        )
