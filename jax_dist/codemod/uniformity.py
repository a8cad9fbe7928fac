"""Which values of a mapped function are the same on each device, as its text shows.

What is computed from the same values is the same; so is what a collective over the mapped axis
gives. What is computed from a device's own slice, or from its number, is not. What changes a value
in place taints it, and every name that it may have: too much rather than too little.
"""

import ast
import enum
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from jax_dist.checker.model import functions, pmaps, scopes, stacking
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.primitives import functions_of


class Same(enum.IntEnum):
    """Whether a value is the same on each device; the larger one holds for what both make."""

    YES = 0
    UNKNOWN = 1  # a function that is not seen may add it up over the devices
    NO = 2


_Value: TypeAlias = "Same | tuple[_Value, ...]"
_Names: TypeAlias = "dict[str, _Value | scopes.Function]"


def of_results(
    module: Module,
    site: Site,
    shared: list[bool],
    by_name: Collection[str | None],
    arity: int | None,
) -> list[Same]:
    """One answer for each of `arity` results, or one for all where that is None.

    `shared` says by position whether an argument is the same on each device. `by_name` are the
    arguments that calls give by name, each device its own; None there stands for `**kwargs`.
    """
    count = 1 if arity is None else arity
    function = functions.innermost(module, site.fun) or _made(module, site.fun)
    if function is None or not functions.is_plain(module, function):
        return [Same.UNKNOWN] * count
    given: list[_Value] = [Same.YES] * _bound(module, site.fun)
    given += [Same.YES if each else Same.NO for each in shared]
    names = [each.arg for each in scopes.parameters(function.args)] if None in by_name else []
    named: dict[str, _Value] = dict.fromkeys(
        (*names[len(given) :], *filter(None, by_name)), Same.NO
    )
    found = _UniformityRun(module, site).call(function, given, named, {})
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


_SIZES = ("shape", "dtype", "ndim", "size")
_FILLING = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault")
_DEEPEST = 6
_MOST = 10  # rounds of one loop until what it carries round is known


class _UniformityRun:
    """Runs functions on what is known of their arguments; `site` maps the outermost of them."""

    def __init__(self, module: Module, site: Site):
        self._module = module
        self._axis = _MappedAxis(module, site)
        self._aliases: dict[str, set[str]] = {}
        self._depth = -1  # calls around the one that is looked at
        self._returned: list[_Value] = []  # by that

    def call(
        self,
        function: scopes.Function,
        given: list[_Value],
        named: dict[str, _Value],
        around: _Names,
    ) -> _Value:
        """What a function returns.

        `given` is without self; `around` is what the names of the functions around it are: those
        that it sets are changed.
        """
        self._depth += 1
        outer, self._returned = self._returned, []
        try:
            names = self._begun(function, given, named, around)
            if isinstance(function, ast.Lambda):
                return self._of(function.body, names)
            self._block(function.body, names)
            returned = self._returned
            own = self._module.scopes.of[function]
            for name, value in names.items():
                if name in around and (name not in own.bindings or name in own.outer):
                    around[name] = _merged(around[name], value)
            inside = functions.own_nodes(function)
            if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in inside):
                returned += [value for value in names.values() if isinstance(value, Same | tuple)]
            return _either(returned)
        finally:
            self._depth -= 1
            self._returned = outer

    def _begun(
        self,
        function: scopes.Function,
        given: list[_Value],
        named: dict[str, _Value],
        around: _Names,
    ) -> _Names:
        """The names of a function before its first statement."""
        names: _Names = dict(around)
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        if isinstance(self._module.parent(function), ast.ClassDef):
            positional = positional[1:]  # self
        known = {each.arg for each in scopes.parameters(arguments)}
        names |= dict.fromkeys(known, Same.YES)
        defaults = zip(reversed(positional), reversed(arguments.defaults), strict=False)
        for each, default in (*defaults, *zip(arguments.kwonlyargs, arguments.kw_defaults)):  # noqa: B905
            if default is not None:
                names[each.arg] = self._whole(default, dict(around))
        for each, value in zip(positional, given, strict=False):
            names[each.arg] = value
        if arguments.vararg is not None:
            names[arguments.vararg.arg] = _joined(tuple(given[len(positional) :]))
        names |= {name: value for name, value in named.items() if name in known}
        if arguments.kwarg is not None:
            rest = tuple(value for name, value in named.items() if name not in known)
            names[arguments.kwarg.arg] = _joined(rest)
        return names

    # --- statements

    def _block(self, statements: Iterable[ast.stmt], names: _Names) -> None:
        for each in statements:
            self._statement(each, names)

    def _statement(self, node: ast.stmt, names: _Names) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names[node.name] = node
            case ast.Assign(targets=targets, value=value):
                found = self._of(value, names)
                for target in targets:
                    self._bind(target, found, names)
                    self._tie(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, self._of(value, names), names)
                self._tie(target, value)
            case ast.AugAssign(target=target, value=value):
                self._bind(target, self._worst([target, value], names), names)
            case ast.Return(value=ast.expr() as value):
                self._returned.append(self._of(value, names))
            case ast.Expr(value=value):
                self._effect(value, names)
            case _:
                self._compound(node, names)

    def _compound(self, node: ast.stmt, names: _Names) -> None:
        match node:
            case ast.If():
                self._of(node.test, names)
                self._one_of([node.body, node.orelse], names)
            case ast.Match():
                subject = self._whole(node.subject, names)
                for each in ast.walk(node):
                    if isinstance(each, ast.MatchAs | ast.MatchStar) and each.name:
                        names[each.name] = subject
                self._one_of([[], *(case.body for case in node.cases)], names)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    found = self._whole(item.context_expr, names)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, found, names)
                self._block(node.body, names)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node, names)
            case ast.Try() | ast.TryStar():
                self._one_of([[], [*node.body, *node.orelse]], names)
                self._one_of([[], *(each.body for each in node.handlers)], names)
                self._block(node.finalbody, names)

    def _one_of(self, branches: list[list[ast.stmt]], names: _Names) -> None:
        """One of several blocks is run: each name is the worst that it may be."""
        ends: list[_Names] = []
        for branch in branches:
            inside = dict(names)
            self._block(branch, inside)
            ends.append(inside)
        for end in ends:
            names.update(end)
        for end in ends:
            names.update((name, _merged(names[name], value)) for name, value in end.items())

    def _loop(self, node: Any, names: _Names) -> None:
        for _ in range(_MOST):
            before = dict(names)
            if isinstance(node, ast.For | ast.AsyncFor):
                self._bind(node.target, self._whole(node.iter, names), names)
                self._tie(node.target, node.iter)
            else:
                self._of(node.test, names)
            self._block(node.body, names)
            for name, value in before.items():
                names[name] = _merged(value, names[name])
            if names == before:
                break
        self._block(node.orelse, names)

    def _bind(self, target: ast.expr, value: _Value, names: _Names) -> None:
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
            case _:
                self._taint(_root_of(target), _joined(value), names)

    # --- what changes in place

    def _tie(self, target: ast.expr, value: ast.expr) -> None:
        """Both names may mean one object from here on."""
        one, two = _root_of(target), _root_of(value)
        if one is None or two is None:
            return
        both = self._aliases.get(one, {one}) | self._aliases.get(two, {two})
        self._aliases.update(dict.fromkeys(both, both))

    def _taint(self, name: str | None, value: Same, names: _Names) -> None:
        if name is not None:
            names.setdefault(name, Same.YES)
            for each in self._aliases.get(name, {name}) & names.keys():
                names[each] = _merged(names[each], value)

    def _effect(self, node: ast.expr, names: _Names) -> None:
        """`metrics.update(x)`, `put(metrics, x)`: what a call by itself may change."""
        found = self._whole(node, names)
        if not isinstance(node, ast.Call):
            return
        given = _given(node)
        worst = self._worst(given, names)
        if isinstance(node.func, ast.Attribute):
            fills = node.func.attr in _FILLING
            self._taint(_root_of(node.func), worst if fills else found, names)
        name = self._module.qualified_name(node.func) or ""
        is_builtin = isinstance(node.func, ast.Name) and name == ""
        is_seen = self._function(node.func, names) is not None
        if is_seen or is_builtin or name.startswith(_LIBRARIES):
            return
        for each in given:
            self._taint(_root_of(each), min(worst, Same.UNKNOWN), names)

    # --- expressions

    def _of(self, node: ast.expr, names: _Names) -> _Value:
        match node:
            case ast.Name(id=name):
                found = names.get(name, Same.YES)
                if isinstance(found, scopes.Function):
                    return self._of_function(found, Same.YES, names)
                return found
            case ast.NamedExpr(target=target, value=value):
                found = self._of(value, names)
                self._bind(target, found, names)
                self._tie(target, value)
                return found
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(self._of(each, names) for each in parts)
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as position)):
                found = self._of(value, names)
                if isinstance(found, tuple) and -len(found) <= position < len(found):
                    return found[position]
                return _joined(found)
            case ast.Attribute(attr=attribute) if attribute in _SIZES:
                return Same.YES
            case ast.Lambda():
                return self._of_function(node, Same.YES, names)
            case ast.Call():
                return self._of_call(node, names)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                names = dict(names)
                for each in node.generators:
                    self._bind(each.target, self._whole(each.iter, names), names)
        parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return self._worst(parts, names)

    def _whole(self, node: ast.expr, names: _Names) -> Same:
        return _joined(self._of(node, names))

    def _worst(self, nodes: Iterable[ast.expr], names: _Names) -> Same:
        return max((self._whole(each, names) for each in nodes), default=Same.YES)

    def _of_function(self, function: Any, given: Same, names: _Names) -> Same:
        """What a function gives that is handed on: of what it is given, and of what it reads."""
        if self._depth > _DEEPEST:
            return Same.UNKNOWN
        count = len(function.args.posonlyargs) + len(function.args.args)
        return _joined(self.call(function, [given] * count, {}, names))

    def _of_call(self, call: ast.Call, names: _Names) -> _Value:
        name = self._module.qualified_name(call.func) or ""
        if name in _TOGETHER:
            value = self._of(call.args[0], names) if call.args else Same.UNKNOWN
            return self._axis.together(call, value)
        if name in _APART:
            return Same.NO
        if name in _DERIVING and self._may_add_up(_given(call), names):
            return Same.UNKNOWN  # the derivative of a sum is one of a device's own part
        function = self._function(call.func, names)
        if function is not None:
            return self._of_known(call, function, names)
        if name in stacking.TREE_MAPS and len(call.args) > 1:
            function = self._function(call.args[0], names)
            if function is not None:
                return self._of_function(function, self._worst(call.args[1:], names), names)
        given = _given(call)
        whole = self._worst(given, names)
        if not name:
            whole = max(whole, self._whole(call.func, names))
        if whole is not Same.NO:
            return max(whole, self._axis.in_unseen(call, name))
        if _is_transparent(call, name) and not self._may_add_up(given, names):
            return Same.NO
        return Same.UNKNOWN

    def _of_known(self, call: ast.Call, function: Any, names: _Names) -> _Value:
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        if self._depth > _DEEPEST or starred or any(each.arg is None for each in call.keywords):
            return Same.UNKNOWN
        given: list[_Value] = [self._of(each, names) for each in call.args]
        named = {str(each.arg): self._of(each.value, names) for each in call.keywords}
        is_inner = self._module.function(function) is not None
        found = self.call(function, given, named, names if is_inner else {})
        worst = max(_joined(tuple(given)), _joined(tuple(named.values())))
        if _changes_arguments(function):
            for each in _given(call):
                self._taint(_root_of(each), worst, names)
        if functions.is_plain(self._module, function):
            return found
        return max(_joined(found), min(worst, Same.UNKNOWN))  # a decorator may give more

    def _function(self, func: ast.expr, names: _Names) -> scopes.Function | None:
        if isinstance(func, ast.Lambda):
            return func
        if isinstance(func, ast.Name) and func.id in names:
            found = names[func.id]
            return found if isinstance(found, scopes.Function) else None
        return pmaps.definition(self._module, func)

    def _may_add_up(self, given: list[ast.expr], names: _Names) -> bool:
        """Whether functions among the arguments use collectives, or what is not followed."""
        for node in (node for argument in given for node in ast.walk(argument)):
            function = node if isinstance(node, ast.Lambda) else None
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                function = self._function(node, names)
            for each in () if function is None else functions.all_nodes(function):
                if isinstance(each, ast.Call):
                    name = self._module.qualified_name(each.func) or ""
                    if name in _TOGETHER or not _is_transparent(each, name):
                        return True
        return False


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _joined(value: _Value) -> Same:
    """What holds for a value as a whole.

    >>> _joined((Same.YES, (Same.NO, Same.UNKNOWN)))
    <Same.NO: 2>
    """
    if isinstance(value, tuple):
        return max((_joined(each) for each in value), default=Same.YES)
    return value


def _merged(one: Any, two: Any) -> Any:
    """What a name is that may be either."""
    if one is two or one == two:
        return one
    states = [
        Same.YES if isinstance(each, scopes.Function) else _joined(each) for each in (one, two)
    ]
    return max(states)


def _either(values: list[_Value]) -> _Value:
    """What one of several `return` gives."""
    if len(values) == 1:
        return values[0]
    if values and all(isinstance(each, tuple) for each in values):
        sizes = {len(each) for each in values}  # type: ignore[arg-type]
        if len(sizes) == 1:
            return tuple(_joined(each) for each in zip(*values, strict=True))  # type: ignore[misc]
    return _joined(tuple(values))


def _root_of(node: ast.AST | None) -> str | None:
    """`x` of `x.y["z"].update`, and of `x.get("y")`."""
    while True:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=node) | ast.Subscript(value=node) | ast.Starred(value=node):
                pass
            case ast.Call(func=ast.Attribute() as node):
                pass
            case _:
                return None


_TOGETHER = functions_of("sum", "max", "min", "gather")
_APART = functions_of("index", "permute", "exchange", "scatter")
_DERIVING = frozenset(
    f"jax.{name}"
    for name in ("grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian")
) | frozenset(("jax.jacobian", "jax.linear_transpose"))
# Their functions use no collectives by themselves.
_KNOWN = ("jax.", "numpy.", "optax.", "contextlib.")
# These do not change what they are given either.
_LIBRARIES = (*_KNOWN, "absl.", "chex.", "flax.", "haiku.", "logging.", "math.", "warnings.")
_OF_STATES = ("apply_gradients", "replace", "_replace", "items", "values", "keys", "get")
_OF_ARRAYS = ("astype", "reshape", "squeeze", "transpose", "copy", "ravel", "flatten", "set", "add")
_REDUCING = ("sum", "mean", "max", "min")
_METHODS = frozenset(_OF_STATES + _OF_ARRAYS + _REDUCING)


class _MappedAxis:
    """The mapped axis of one site."""

    def __init__(self, module: Module, site: Site):
        axis = site.arguments.get("axis_name")
        self._is_named = axis is not None
        self._axis = None if axis is None or not module.holds(axis) else axis

    def together(self, call: ast.Call, value: _Value) -> _Value:
        """What a collective gives; over another axis than the mapped one it changes nothing."""
        axes = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "axis_name")]
        grouped = any(each.arg == "axis_index_groups" for each in call.keywords)
        if not self._is_named:
            return _joined(value)
        if not axes or grouped:
            return min(_joined(value), Same.UNKNOWN)
        mine = self._axis
        given = axes[0].elts if isinstance(axes[0], ast.Tuple | ast.List) else [axes[0]]
        if mine is None or any(ast.dump(each) == ast.dump(mine) for each in given):
            return Same.YES
        literal = all(isinstance(each, ast.Constant) for each in (mine, *given))
        return _joined(value) if literal else min(_joined(value), Same.UNKNOWN)

    def in_unseen(self, call: ast.Call, name: str) -> Same:
        """What a call that is not followed gives of equal arguments: with the axis, any number."""
        if self._axis is None or _is_transparent(call, name):
            return Same.YES
        mine = ast.dump(self._axis)
        return Same.UNKNOWN if any(ast.dump(e) == mine for e in _given(call)) else Same.YES


def _is_transparent(call: ast.Call, name: str) -> bool:
    """Whether a call that is not followed surely uses no collective of its own."""
    if name:
        return name.startswith(_KNOWN)
    return isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS


def _changes_arguments(function: Any) -> bool:
    """Whether a function sets parts of its parameters, or calls methods for what they change."""
    names = {each.arg for each in scopes.parameters(function.args)}
    for node in functions.all_nodes(function):
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store()):
                if _root_of(node) in names:
                    return True
            case ast.Expr(value=ast.Call(func=ast.Attribute() as called)):
                if _root_of(called) in names:
                    return True
    return False
