"""Whether the results of a mapped function are the same on each device, as its text shows.

What is computed from the same values is the same; so is what a collective over the mapped axis
gives. What is computed from a device's own slice, or from its number, is not.
"""

import ast
import enum
from collections.abc import Iterable
from typing import Any, TypeAlias

from jax_dist.checker import functions, pmaps, scopes, stacking, structure
from jax_dist.checker.modules import PARTIAL, Module
from jax_dist.checker.pmaps import Site


class Same(enum.IntEnum):
    """Of two, the larger one holds for what is computed from both."""

    YES = 0
    UNKNOWN = 1  # a function that is not seen may add it up over the devices
    NO = 2


Value: TypeAlias = "Same | tuple[Value, ...]"

_TOGETHER = frozenset(f"jax.lax.{name}" for name in ("pmean", "psum", "pmax", "pmin", "all_gather"))
_APART = frozenset(
    f"jax.lax.{name}"
    for name in ("axis_index", "ppermute", "pshuffle", "all_to_all", "psum_scatter")
)
_SIZES = ("shape", "dtype", "ndim", "size")
_KNOWN = ("jax.", "numpy.", "optax.")  # their functions use no collectives by themselves
_OF_STATES = ("apply_gradients", "replace", "_replace", "items", "values", "keys", "get")
_OF_ARRAYS = ("astype", "reshape", "squeeze", "transpose", "copy", "ravel", "flatten", "set", "add")
_REDUCING = ("sum", "mean", "max", "min")
_METHODS = frozenset(_OF_STATES + _OF_ARRAYS + _REDUCING)
_DEEPEST = 6


def of_results(module: Module, site: Site, shared: list[bool], arity: int | None) -> list[Same]:
    """One answer for each result, or one for all where `arity` is None.

    Args:
      module: the file.
      site: what maps the function.
      shared: by position, whether an argument is the same on each device.
      arity: how many results there are.
    """
    count = 1 if arity is None else arity
    function = structure.mapped_function(module, site) or _made(module, site.fun)
    if function is None:
        return [Same.UNKNOWN] * count
    given = [Same.YES] * _bound(module, site.fun)
    given += [Same.YES if each else Same.NO for each in shared]
    found = _Run(module, site).call(function, given, {}, {}, 0)
    if arity is None:
        return [_joined(found)]
    if isinstance(found, tuple) and len(found) == arity:
        return [_joined(each) for each in found]
    return [min(_joined(found), Same.UNKNOWN)] * count  # not told apart


def _made(module: Module, fun: Any) -> scopes.Function | None:
    """The inner function that a function of this file makes: `make_step(rate)`."""
    maker = pmaps.definition(module, fun.func) if isinstance(fun, ast.Call) else None
    results = None if maker is None else functions.results_of(maker)
    if not results or len(results) != 1 or not isinstance(results[0], ast.Name):
        return None
    made = pmaps.definition(module, results[0])
    return made if made is not None and module.function(made) is maker else None


def _bound(module: Module, fun: Any) -> int:
    """How many positional arguments partials around the function give."""
    count = 0
    if _made(module, fun) is not None:
        return count
    while isinstance(fun, ast.Call) and fun.args:
        if module.qualified_name(fun.func) in PARTIAL:
            count += len(fun.args) - 1
        fun = fun.args[0]
    return count


def _joined(value: Value) -> Same:
    if isinstance(value, tuple):
        return max((_joined(each) for each in value), default=Same.YES)
    return value


_Names: TypeAlias = "dict[str, Value | scopes.Function]"


class _Run:
    """Runs functions on what is known of their arguments."""

    def __init__(self, module: Module, site: Site):
        self._module = module
        axis = site.arguments.get("axis_name")
        self._axis = None if axis is None or not module.holds(axis) else axis

    def call(
        self,
        function: scopes.Function,
        given: list[Any],
        named: dict[str, Any],
        around: _Names,
        depth: int,
    ) -> Value:
        """What a function returns."""
        names: _Names = dict(around)
        positional = [*function.args.posonlyargs, *function.args.args]
        if isinstance(self._module.parent(function), ast.ClassDef):
            positional = positional[1:]  # self
        for each in scopes.parameters(function.args):
            names[each.arg] = Same.YES
        rest = Same.YES
        for number, value in enumerate(given):
            if number < len(positional):
                names[positional[number].arg] = value
            else:
                rest = max(rest, _joined(value))
        if function.args.vararg is not None:
            names[function.args.vararg.arg] = rest
        names.update(named)
        if isinstance(function, ast.Lambda):
            return self._of(function.body, names, depth)
        returned: list[Value] = []
        self._block(function.body, names, returned, depth)
        return _either(returned)

    def _block(
        self, statements: Iterable[ast.stmt], names: _Names, returned: list[Value], depth: int
    ) -> None:
        for each in statements:
            self._statement(each, names, returned, depth)

    def _statement(self, node: ast.stmt, names: _Names, returned: list[Value], depth: int) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names[node.name] = node
            case ast.Assign(targets=targets, value=value):
                found = self._of(value, names, depth)
                for target in targets:
                    self._bind(target, found, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, self._of(value, names, depth), names)
            case ast.AugAssign(target=target, value=value):
                before = _joined(self._of(target, names, depth))
                self._bind(target, max(before, _joined(self._of(value, names, depth))), names)
            case ast.Return(value=ast.expr() as value):
                returned.append(self._of(value, names, depth))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name))) as call):
                if name in names:  # `metrics.update(...)`
                    names[name] = max(
                        self._state(names[name]), _joined(self._of(call, names, depth))
                    )
            case ast.If() | ast.For() | ast.While() | ast.With() | ast.Try():
                self._compound(node, names, returned, depth)

    def _compound(self, node: Any, names: _Names, returned: list[Value], depth: int) -> None:
        before = dict(names)
        if isinstance(node, ast.For):
            self._bind(node.target, _joined(self._of(node.iter, names, depth)), names)
        handlers = [each for handler in getattr(node, "handlers", ()) for each in handler.body]
        blocks = (node.body, getattr(node, "orelse", ()), handlers, getattr(node, "finalbody", ()))
        for _ in range(2):  # a loop may carry a value round once
            for block in blocks:
                self._block(block, names, returned, depth)
            for name, value in before.items():
                new = names[name]
                if new is not value and not isinstance(new, scopes.Function):
                    names[name] = max(self._state(value), self._state(new))

    def _bind(self, target: ast.expr, value: Value, names: _Names) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                apart = isinstance(value, tuple) and len(value) == len(parts)
                whole = _joined(value)
                for number, part in enumerate(parts):
                    self._bind(part, value[number] if apart else whole, names)  # type: ignore[index]
            case ast.Starred(value=inner):
                self._bind(inner, _joined(value), names)
            case ast.Subscript(value=ast.Name(id=name)) | ast.Attribute(value=ast.Name(id=name)):
                names[name] = max(self._state(names.get(name, Same.YES)), _joined(value))

    def _state(self, value: Any) -> Same:
        return Same.YES if isinstance(value, scopes.Function) else _joined(value)

    # --- expressions

    def _of(self, node: ast.expr, names: _Names, depth: int) -> Value:
        match node:
            case ast.Name(id=name):
                found = names.get(name, Same.YES)
                if isinstance(found, scopes.Function):
                    return self._of_function(found, Same.YES, names, depth)
                return found
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(self._of(each, names, depth) for each in parts)
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as position)):
                found = self._of(value, names, depth)
                if isinstance(found, tuple) and -len(found) <= position < len(found):
                    return found[position]
                return _joined(found)
            case ast.Attribute(attr=attribute) if attribute in _SIZES:
                return Same.YES
            case ast.Lambda():
                return self._of_function(node, Same.YES, names, depth)
            case ast.Call():
                return self._of_call(node, names, depth)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                names = dict(names)
                for each in node.generators:
                    self._bind(each.target, _joined(self._of(each.iter, names, depth)), names)
        parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return max((_joined(self._of(each, names, depth)) for each in parts), default=Same.YES)

    def _of_function(self, function: Any, given: Same, names: _Names, depth: int) -> Same:
        """What a function gives that is handed on: of what it is given, and of what it reads."""
        if depth > _DEEPEST:
            return Same.UNKNOWN
        count = len(function.args.posonlyargs) + len(function.args.args)
        return _joined(self.call(function, [given] * count, {}, names, depth + 1))

    def _of_call(self, call: ast.Call, names: _Names, depth: int) -> Value:
        name = self._module.qualified_name(call.func) or ""
        if name in _TOGETHER:
            return self._together(call, names, depth)
        if name in _APART:
            return Same.NO
        function = self._function(call.func, names)
        if function is not None:
            return self._of_known(call, function, names, depth)
        if name in stacking.TREE_MAPS and len(call.args) > 1:
            function = self._function(call.args[0], names)
            if function is not None:
                trees = [_joined(self._of(each, names, depth)) for each in call.args[1:]]
                return self._of_function(function, max(trees), names, depth)
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        whole = max((_joined(self._of(each, names, depth)) for each in given), default=Same.YES)
        if not name:
            whole = max(whole, _joined(self._of(call.func, names, depth)))
        if whole is not Same.NO:
            return whole
        if self._is_transparent(call, name) and not self._may_add_up(given, names):
            return Same.NO
        return Same.UNKNOWN

    def _of_known(self, call: ast.Call, function: Any, names: _Names, depth: int) -> Value:
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        if depth > _DEEPEST or starred or any(each.arg is None for each in call.keywords):
            return Same.UNKNOWN
        given: list[Any] = [self._of(each, names, depth) for each in call.args]
        named = {str(each.arg): self._of(each.value, names, depth) for each in call.keywords}
        is_inner = self._module.function(function) is not None
        return self.call(function, given, named, names if is_inner else {}, depth + 1)

    def _together(self, call: ast.Call, names: _Names, depth: int) -> Value:
        """A collective; over another axis than the mapped one it changes nothing here."""
        axes = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "axis_name")]
        value = self._of(call.args[0], names, depth) if call.args else Same.UNKNOWN
        grouped = any(each.arg == "axis_index_groups" for each in call.keywords)
        if not axes or grouped:
            return min(_joined(value), Same.UNKNOWN)
        mine = self._axis
        given = axes[0].elts if isinstance(axes[0], ast.Tuple | ast.List) else [axes[0]]
        if mine is None or any(ast.dump(each) == ast.dump(mine) for each in given):
            return Same.YES
        literal = all(isinstance(each, ast.Constant) for each in (mine, *given))
        return _joined(value) if literal else min(_joined(value), Same.UNKNOWN)

    def _function(self, func: ast.expr, names: _Names) -> scopes.Function | None:
        if isinstance(func, ast.Lambda):
            return func
        if isinstance(func, ast.Name) and func.id in names:
            found = names[func.id]
            return found if isinstance(found, scopes.Function) else None
        return pmaps.definition(self._module, func)

    def _is_transparent(self, call: ast.Call, name: str) -> bool:
        """Whether a call that is not followed surely uses no collective of its own."""
        if name:
            return name.startswith(_KNOWN)
        return isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS

    def _may_add_up(self, given: list[ast.expr], names: _Names) -> bool:
        """Whether functions among the arguments use collectives, or what is not followed."""
        for argument in given:
            for node in ast.walk(argument):
                function = node if isinstance(node, ast.Lambda) else None
                if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                    function = self._function(node, names)
                if function is not None and self._calls_others(function):
                    return True
        return False

    def _calls_others(self, function: Any) -> bool:
        for node in functions.all_nodes(function):
            if isinstance(node, ast.Call):
                name = self._module.qualified_name(node.func) or ""
                if name in _TOGETHER or not self._is_transparent(node, name):
                    return True
        return False


def _either(values: list[Value]) -> Value:
    """What one of several `return` gives."""
    if len(values) == 1:
        return values[0]
    if values and all(isinstance(each, tuple) for each in values):
        sizes = {len(each) for each in values}  # type: ignore[arg-type]
        if len(sizes) == 1:
            return tuple(_joined(each) for each in zip(*values, strict=True))  # type: ignore[misc]
    return _joined(tuple(values))
