"""What is done with one value that has an axis over devices in front."""

import ast
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

from jax_dist.checker.model import flow, functions, pmaps, scopes, stacking
from jax_dist.checker.model.flow import Flow, Origin, is_tree
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import escapes
from jax_dist.codemod.escapes import Escaped, Kept


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class First:
    """The part of one device is taken: `unreplicate(x)`, `x[0]`, `tree_map(lambda x: x[0], x)`."""

    node: ast.expr  # the whole
    of: ast.expr  # x


@dataclasses.dataclass(frozen=True, slots=True)
class GivenTo:
    """It is a positional argument of a mapped call."""

    call: ast.Call
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """It is given to a function of another file, once, in a statement of its own."""

    node: ast.expr


@dataclasses.dataclass(frozen=True, slots=True)
class Collected:
    """It is put into a list whose elements lose the axis later, by flax's `get_metrics`."""

    calls: tuple[ast.Call, ...]  # of get_metrics


Use: TypeAlias = First | GivenTo | Kept | Escaped | Shown | Collected

_GET_METRICS = "flax.training.common_utils.get_metrics"
# Methods of trees and train states that change nothing in place.
_PURE = frozenset(
    ("apply_fn", "apply_gradients", "copy", "get", "items", "keys", "replace", "_replace", "values")
)


class Uses:
    """What is done with the values of one file.

    Args:
      module: the file.
    """

    def __init__(self, module: Module):
        self._module = module
        self._flow: Flow = flow.of(module)

    def carriers(self) -> Iterator[ast.expr]:
        """All that is read and may have the axis: names, `self.x`, calls that make it."""
        for node in ast.walk(self._module.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                if any(origin.is_stacked for origin in self.origins(node)):
                    yield node
            elif isinstance(node, ast.Call) and not _is_leaf_call(self._module, node):
                is_local = pmaps.definition(self._module, node.func) is not None
                found = self._flow.origins(node)
                if any(each.is_stacked and (is_local or each.node is node) for each in found):
                    yield node
            elif isinstance(node, ast.Attribute) and functions.is_self(node):
                is_read = isinstance(node.ctx, ast.Load)
                if is_read and any(each.is_stacked for each in self._flow.origins(node)):
                    yield node

    def origins(self, node: ast.expr, around: tuple[ast.expr, ...] = ()) -> list[Origin]:
        """Where a value comes from; of a tuple of values, where each of them does.

        `around` are the tuples that it is a part of: `x = (x, y)` in a loop is a part of itself.
        """
        found: list[Origin] = []
        for origin in self._flow.origins(node):
            whole = origin.node
            if any(whole is each for each in around):
                continue
            if isinstance(whole, ast.Tuple) and not origin.path and whole is not node:
                parts = (part for e in whole.elts for part in self.origins(e, (*around, whole)))
                found += (dataclasses.replace(each, through=origin.through) for each in parts)
            else:
                found.append(origin)
        return found

    def use_of(self, node: ast.expr) -> Use:
        """What is done with a value, seen from the expression that reads it."""
        around = self._module.parent(node)
        match around:
            case ast.Attribute(value=value) | ast.Subscript(value=value) if value is node:
                found = self._flow.origins(around)
                if all(origin.kind is Kind.ONE for origin in found):
                    return _first(self._module, around, node)
                if all(origin.is_stacked for origin in found):
                    return self.use_of(around)
                return Escaped(f"line {node.lineno} uses {_short(self._module, around)}")
            case ast.Call():
                return self._in_call(node, around)
            case ast.keyword():
                return self._by_name(node)
            case ast.Assign(value=value) if value is node:
                return self._assigned(around, node)
            case ast.Tuple() | ast.List() if isinstance(around.ctx, ast.Load):
                return _in_tuple(self._module, around, node)
            case ast.Return():
                return _returned(self._module, around)
            case ast.IfExp(test=test) if test is not node:
                return self.use_of(around)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]) | ast.Expr():
                return Kept()  # its shape does not matter there
            case ast.Lambda():
                return Escaped(f"a lambda in line {around.lineno} returns it")
        what = type(around).__name__.lower()
        return Escaped(f"line {node.lineno} uses it in a {what}: {_short(self._module, around)}")

    def is_plain_read(self, node: ast.expr) -> bool:
        """Whether a name or attribute is read where a copy of its value does as well."""
        top = _part_of(self._module, node)
        if not isinstance(getattr(top, "ctx", None) or ast.Load(), ast.Load):
            return False
        around = self._module.parent(top)
        if isinstance(around, ast.Call) and around.func is top:
            return isinstance(top, ast.Attribute) and top is not node and top.attr in _PURE
        if isinstance(around, ast.AugAssign | ast.Starred | ast.FormattedValue | ast.Compare):
            return False
        return not isinstance(node, ast.Call)

    def call_given(self, node: ast.expr) -> ast.Call | None:
        """The call that gets a value or a part of it, by itself or in a tuple."""
        given = _part_of(self._module, node)
        around = self._module.parent(given)
        while isinstance(around, ast.Tuple | ast.keyword):
            given, around = around, self._module.parent(around)
        return around if isinstance(around, ast.Call) and around.func is not given else None

    def unseen(self, site: Site, *, trusted: bool = False) -> str:
        """Why not all calls of a mapped function are known; "" where they are.

        Args:
          site: where it is mapped.
          trusted: whether calls that are not seen fit; only transformations count.
        """
        if not trusted and (why := _known_elsewhere(self._module, site)):
            return why
        waiting = list(pmaps.held_by(self._module, site))
        seen: set[ast.expr] = set()
        while waiting:
            read = waiting.pop()
            if read in seen:
                continue
            seen.add(read)
            call = self._module.parent(read)
            if isinstance(call, ast.Call) and call.func is read:
                if _may_be_traced(self._module, call):
                    return f"line {read.lineno} may be run under a transformation"
                called = self._flow.mapped_calls.get(call)
                is_it = called is not None and called.node is site.node
                if not trusted and not (is_it and self._calls_it_alone(read)):
                    return f"line {read.lineno} may call another function in its place"
            elif read is site.node and isinstance(call, ast.Assign | ast.AnnAssign):
                continue  # its reads are among those which hold it
            else:
                use = self.use_of(read)
                if isinstance(use, Kept):
                    waiting += use.reads
                elif not trusted:
                    return f"the mapped function is handed on in line {read.lineno}"
        return ""

    def _in_call(self, node: ast.expr, call: ast.Call) -> Use:
        if node is call.func:
            return Escaped(f"line {node.lineno} calls it")
        if call in self._flow.mapped_calls:
            return GivenTo(call, next(n for n, each in enumerate(call.args) if each is node))
        done = stacking.stacking(self._module, call)
        if done is not None and done.kind is Kind.ONE and done.of is node:
            return _first(self._module, call, node)
        if stacking.first_of_leaves(self._module, call) is node:
            if any(getattr(each, "attr", "") == "addressable_data" for each in ast.walk(call)):
                return Escaped(f"line {node.lineno} asks for the part that one device holds")
            return _first(self._module, call, node)
        name = self._module.qualified_name(call.func)
        if name == "jax.block_until_ready" and call.args == [node]:
            return self.use_of(call)
        if (followed := _into(self._module, call, node)) is not None:
            return followed
        if calls := self._collected(call):
            return Collected(calls)
        repeating = ast.For | ast.AsyncFor | ast.While
        is_statement = isinstance(self._module.parent(call), ast.Expr)
        is_repeated = any(isinstance(each, repeating) for each in self._module.ancestors(call))
        if name is not None and is_statement and not is_repeated:
            return Shown(node)
        return Escaped(f"line {node.lineno} gives it to {_short(self._module, call.func)}")

    def _collected(self, call: ast.Call) -> tuple[ast.Call, ...]:
        """The calls of get_metrics on the list that `call` appends to; () if more is done to it."""
        match call.func:
            case ast.Attribute(value=ast.Name() as found, attr="append"):
                home = self._module.scope(found).lookup(found.id)
            case _:
                return ()
        if home is None:
            return ()
        is_metrics = lambda each: self._module.qualified_name(each.func) == _GET_METRICS
        for binding in home[1]:
            match binding.value:
                case ast.List(elts=[]):
                    pass
                case ast.Call() as value if is_metrics(value):
                    pass
                case _:
                    return ()
        calls: list[ast.Call] = []
        for read in self._module.reads(home[0], found.id):
            around = self._module.parent(read)
            match around:
                case ast.Attribute(attr="append"):
                    match self._module.parent(around):  # what is appended has the axis too
                        case ast.Call(func=called, args=[value]) if called is around:
                            if not self._flow.is_stacked(value):
                                return ()
                        case _:
                            return ()
                case ast.Call(args=[argument]) if argument is read:
                    if is_metrics(around):
                        calls.append(around)
                    elif _is_filled(self._module, read):
                        return ()
                case _ if _is_filled(self._module, read):
                    return ()
        return tuple(calls)

    def _by_name(self, node: ast.expr) -> Use:
        call = self._module.parent(self._module.parent(node))
        if not isinstance(call, ast.Call):
            return Escaped(f"line {node.lineno} gives it to a class")
        if call in self._flow.mapped_calls:
            return Escaped(f"line {node.lineno} gives it by name to a mapped function")
        followed = _into(self._module, call, node)
        return followed or Escaped(
            f"line {node.lineno} gives it to {_short(self._module, call.func)}"
        )

    def _assigned(self, statement: ast.Assign, node: ast.expr) -> Use:
        found: list[ast.expr] = []
        for target in statement.targets:
            match target:
                case ast.Name():
                    ways = [escapes.from_target(self._module, target, statement)]
                case ast.Tuple(elts=parts) | ast.List(elts=parts):
                    if not self._can_unpack(node):
                        return Escaped(f"line {node.lineno} unpacks it, and it may be an array")
                    ways = [escapes.from_target(self._module, each, each) for each in parts]
                case _:
                    return Escaped(f"line {node.lineno} keeps it in {_short(self._module, target)}")
            for way in ways:
                if isinstance(way, Escaped):
                    return way
                found += way.reads
        return Kept(tuple(found))

    def _can_unpack(self, node: ast.expr) -> bool:
        """Whether the parts of a value are parts of a tree, and not the rows of an array."""
        # Rows of arrays have an axis over devices: none unpacks them.
        if node in self._flow.mapped_calls:
            return is_tree(self._module, self._flow.origins(node)[0]) is not False
        return all(
            is_tree(self._module, origin) or isinstance(origin.of, ast.Tuple | ast.List)
            for origin in self._flow.origins(node)
        )

    def _calls_it_alone(self, read: ast.expr) -> bool:
        """Whether nothing else may be meant by the name that is called."""
        if isinstance(read, ast.Name):
            bindings = self._module.reaching(read) or []
            is_none = lambda value: isinstance(value, ast.Constant) and value.value is None
            values = [each for each in bindings if not is_none(each.value)]
            if len(values) == 1 and values[0].kind != "parameter":
                return True
        return len(self._flow.origins(read)) == 1


def _is_leaf_call(module: Module, node: ast.Call) -> bool:
    """Whether it stands in the lambda of a tree_map: there it is done to each leaf."""
    around = module.parent(node)
    call = module.parent(around) if isinstance(around, ast.Lambda) else None
    if not isinstance(call, ast.Call) or module.qualified_name(call.func) not in stacking.TREE_MAPS:
        return False
    return stacking.stacking(module, call) is not None


def _part_of(module: Module, node: ast.expr) -> Any:
    """`x.a["b"]`, for `x` there."""
    top, around = node, module.parent(node)
    while isinstance(around, ast.Attribute | ast.Subscript) and around.value is top:
        top, around = around, module.parent(around)
    return top


def _first(module: Module, whole: ast.expr, of: ast.expr) -> First | Escaped:
    """flax's unreplicate asks where an array lies: of the part it would now take another one."""
    around = module.parent(whole)
    if isinstance(around, ast.Call) and (
        module.qualified_name(around.func) in stacking.UNREPLICATE
    ):
        return Escaped(f"line {whole.lineno} takes a part of it twice")
    return First(whole, of)


def _is_filled(module: Module, read: ast.Name) -> bool:
    """Whether a read may see the list; after `xs = get_metrics(xs)` it sees another value."""
    values = module.values(read)
    return values is None or any(not isinstance(value, ast.Call) for value in values)


def _into(module: Module, call: ast.Call, node: ast.expr) -> Use | None:
    """Into a function of this file; None where the flow does not go on there."""
    function: Any = pmaps.definition(module, call.func)
    if function is None or isinstance(function, ast.Lambda):
        return None
    if not escapes.is_followed(module, function):
        return None
    for parameter in scopes.parameters(function.args):
        if functions.argument_of(module, call, function, parameter) is node:
            return escapes.from_binding(
                module, module.scopes.of[function], parameter.arg, parameter
            )
    return None


def _in_tuple(module: Module, display: Any, node: ast.expr) -> Use:
    position = next(number for number, each in enumerate(display.elts) if each is node)
    size = len(display.elts)
    match module.parent(display):
        case ast.Call() as call if isinstance(display, ast.Tuple):
            if (followed := _into(module, call, display)) is not None:
                return followed
        case ast.Return() as statement:
            return _returned(module, statement, position, size)
        case ast.Assign(targets=[ast.Tuple(elts=parts)]) if len(parts) == size:
            if not any(isinstance(each, ast.Starred) for each in (*parts, *display.elts)):
                return escapes.from_target(module, parts[position], parts[position])
    return Escaped(f"line {node.lineno} puts it into a tuple or list")


def _returned(
    module: Module, statement: ast.stmt, position: int | None = None, size: int = 0
) -> Use:
    """Out of a function: to its callers, which must all be seen, or to those of other files."""
    function: Any = module.function(statement)
    if function is None or isinstance(function, ast.Lambda):
        return Escaped(f"line {statement.lineno} returns it")
    calls = escapes.callers(module, function)
    if calls is None:
        return Escaped(f"{function.name} returns it, and not all that call it are seen")
    if module.graph is not None and module.function(function) is None:
        own = os.path.abspath(module.source.path)
        for path in module.graph.users_of_result(own, function.name):
            return Escaped(f"{function.name} returns it, and {os.path.basename(path)} uses that")
    found: list[ast.expr] = []
    for call in calls:
        match module.parent(call):
            case _ if position is None:
                found.append(call)
            case ast.Assign(targets=[ast.Tuple(elts=parts)]) if len(parts) == size and not any(
                isinstance(each, ast.Starred) for each in parts
            ):
                way = escapes.from_target(module, parts[position], parts[position])
                if isinstance(way, Escaped):
                    return way
                found += way.reads
            case ast.Expr():
                pass
            case _:
                return Escaped(f"line {call.lineno} gets it in a tuple")
    caution = f"{function.name} returns it: its callers now get it without the device axis"
    return Kept(tuple(found), "" if calls else caution)


def _short(module: Module, node: Any) -> str:
    text = " ".join(module.text(node).split()) if hasattr(node, "lineno") else "it"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _known_elsewhere(module: Module, site: Site) -> str:
    """Whether other files, or other objects of this one, may call it."""
    if site.form != "call":
        function, outermost = site.fun, site.fun.decorator_list[0]
        if isinstance(module.parent(function), ast.ClassDef):
            return "it is a method"
        if outermost is not site.node:
            return f"line {outermost.lineno} decorates the mapped function"
        is_seen = escapes.is_private(module, function)
        return "" if is_seen else f"other files may call {function.name}"
    statement = module.parent(site.node)
    for target in statement.targets if isinstance(statement, ast.Assign) else ():
        if isinstance(target, ast.Attribute):
            why = _attribute_elsewhere(module, target)
        elif isinstance(target, ast.Name):
            found = escapes.from_target(module, target, statement)
            why = "" if isinstance(found, Kept) else found.why
        else:
            why = f"line {target.lineno} keeps the mapped function in {module.text(target)}"
        if why:
            return why
    return ""


def _attribute_elsewhere(module: Module, target: ast.Attribute) -> str:
    owner = module.class_of(target)
    if not isinstance(target.value, ast.Name) or owner is None:
        return f"line {target.lineno} keeps the mapped function in {module.text(target)}"
    for node in escapes.attributes(module, target.attr):
        same = isinstance(node.value, ast.Name) and node.value.id == target.value.id
        if not same or module.class_of(node) is not owner:
            return f"line {node.lineno} may mean it by {module.text(node)}"
    if escapes.is_used_elsewhere(module, target.attr):
        return f"other files may call .{target.attr}"
    return ""


_TRANSFORM = ("jax.", "flax.linen.", "equinox.", "haiku.")
_RUN = (*stacking.TREE_MAPS, "jax.pure_callback", "jax.debug.callback")


def _may_be_traced(module: Module, node: ast.AST) -> bool:
    """Whether a function around a place, or one that calls it, is given to jax.grad or the like."""
    waiting: list[ast.AST] = [node]
    seen: set[ast.AST] = set()
    while waiting:
        function = module.function(waiting.pop())
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting.append(function)
        if any(_transforms(module, each) for each in getattr(function, "decorator_list", ())):
            return True
        for read in _reads(module, function):
            call, given = module.parent(read), read
            while isinstance(call, ast.Call) and module.qualified_name(call.func) in PARTIAL:
                call, given = module.parent(call), call
            if isinstance(call, ast.Call) and call.func is given:
                waiting.append(call)
            elif isinstance(call, ast.Call) and _transforms(module, call.func):
                return True
    return False


def _reads(module: Module, function: Any) -> Iterator[ast.expr]:
    if isinstance(function, ast.Lambda):
        yield function
        around = module.parent(function)
        targets = around.targets if isinstance(around, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Name):
                yield from module.reads(module.scope(target), target.id)
    elif isinstance(module.parent(function), ast.ClassDef):
        yield from escapes.attributes(module, function.name)
    else:
        yield from module.reads(module.scope(function), function.name)


def _transforms(module: Module, function: ast.expr) -> bool:
    """Whether it traces what it is given; a decorator may bind arguments first."""
    if isinstance(function, ast.Call):
        if module.qualified_name(function.func) in PARTIAL and function.args:
            function = function.args[0]
        else:
            function = function.func
    name = module.qualified_name(function) or ""
    return name.startswith(_TRANSFORM) and name not in _RUN
