"""The mapped functions of a file: how they are mapped, and all their calls."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import Left
from jax_dist.migrate.shard_map.expressions import (
    called_function,
    callers,
    parameter_of,
    results_of,
    returned_to,
)

_TAKEN = frozenset(
    ("axis_name", "in_axes", "out_axes", "static_broadcasted_argnums", "donate_argnums", "devices")
)


@dataclasses.dataclass(slots=True, eq=False)
class Mapped:
    """One mapped function: the call or decorator of pmap, and all calls of the result."""

    site: Site
    texts: dict[str, str]  # of the arguments of pmap, as this file would write them
    calls: list[ast.Call]
    parameters: list[str]  # the names of the arguments in all calls, in their order
    axes: list[int | None]  # of in_axes, for each parameter
    static: tuple[int, ...]
    results: int | None  # how many it returns; None: one value
    out_axes: int | tuple[int | None, ...] | None = 0
    named: frozenset[str] = frozenset()  # parameters that the function takes by name only

    @property
    def dynamic(self) -> list[str]:
        """Return the parameters that are not static, in order."""
        return [name for p, name in enumerate(self.parameters) if p not in self.static]

    def is_mapped(self, position: int) -> bool:
        """Return whether pmap maps over an argument: it is neither static nor broadcast."""
        return position not in self.static and self.axes[position] is not None

    def donates(self, position: int) -> bool:
        """Return whether an argument may be donated; True if donate_argnums is computed."""
        donated = _literal(self.site.arguments.get("donate_argnums"), ())
        is_it = donated is NotImplemented or donated == position
        return is_it or (isinstance(donated, tuple | list) and position in donated)

    def arguments(self, call: ast.Call) -> list[ast.expr]:
        """Return the arguments of a call, in the order of the parameters."""
        by_name = {word.arg: word.value for word in call.keywords}
        positional = len(call.args)
        return [*call.args, *(by_name[name] for name in self.parameters[positional:])]


def read(module: Module, site: Site) -> Mapped:
    """Return the mapped function of a site. Raises Left if it cannot be migrated."""
    if site.unknown:
        raise Left(
            f"its arguments are given by {site.unknown}", "Write them out, then migrate again."
        )
    if unknown := sorted({*site.arguments} - _TAKEN):
        raise Left(f"{unknown[0]} has no counterpart", f"Leave {unknown[0]} out, or map by hand.")
    calls = _calls_of(module, site)
    if not calls:
        raise Left(
            "its calls are not in this file",
            "Place the state and the batches by hand where it is called, or use --to vendored.",
        )
    function = functions.innermost(module, site.fun) or pmaps.definition(module, site.fun)
    parameters, named = _parameters(module, site, function, calls)
    numbers = _literal(site.arguments.get("static_broadcasted_argnums"), ())
    if numbers is NotImplemented:
        raise Left(
            "static_broadcasted_argnums is computed", "Write its numbers, then migrate again."
        )
    static = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if named and (static or site.form != "call"):
        raise Left("a call gives arguments by name", "Give them by position.")
    positional = len(parameters) - len(named)
    # pmap maps what is given by name over dimension 0, whatever in_axes says.
    axes = [*_flat_in_axes(site.arguments.get("in_axes"), positional), *[0] * len(named)]
    out = _literal(site.arguments.get("out_axes"), 0)
    outs = out if isinstance(out, tuple) else (out,)
    if any(axis not in (0, None) for axis in outs):
        raise Left("out_axes places the mapped axis elsewhere", "Transpose the results by hand.")
    results = _result_count(module, function, calls)
    texts = {
        name: _text(module, site, node)
        for name, node in site.arguments.items()
        if not (isinstance(node, ast.Constant) and node.value is None)
    }
    fun = site.fun
    is_method = isinstance(module.parent(fun), ast.ClassDef)
    if static and site.form != "call" and (is_method or fun.decorator_list[0] is not site.node):
        raise Left("a decorator has static arguments", "Map the function below it instead.")
    return Mapped(site, texts, calls, parameters, axes, static, results, out, named)


def _text(module: Module, site: Site, node: ast.expr) -> str:
    """Return an argument of pmap as this file would write it. Raises Left.

    A partial of another file has its arguments from there: those of `constants.pmap` are literals,
    or names such as `constants.AXIS`.
    """
    if module.holds(node):
        return module.text(node)
    if isinstance(node, ast.Name) and isinstance(site.reference, ast.Attribute):
        return f"{module.text(site.reference.value)}.{node.id}"
    if _literal(node, None) is NotImplemented:
        raise Left("its arguments are given in another file", "Write them out here.")
    return ast.unparse(node)


def _calls_of(module: Module, site: Site) -> list[ast.Call]:
    """Return all calls of a mapped function. Raises Left if other files may call it.

    A handle is an expression whose value is the mapped function.
    """
    calls: dict[ast.Call, None] = {}
    waiting = [*pmaps.held_by(module, site)]
    seen: set[ast.AST] = set()
    while waiting:
        handle = waiting.pop(0)
        if handle in seen:
            continue
        seen.add(handle)
        call = module.call_of(handle)
        if call is not None:
            calls[call] = None
            continue
        reads = _next_reads(module, handle)
        if reads is None:
            where = module.source.position(module.span(handle)[0]).line
            raise Left(
                "the mapped function goes where its calls are not seen",
                f"Call it in this file only; line {where} hands it on.",
            )
        waiting += reads
    return sorted(calls, key=scopes.place)


def _next_reads(module: Module, handle: ast.expr) -> Sequence[ast.expr] | None:
    """Return where the name, parameter or result that a mapped function is given to is read.

    `handle` is the mapped function as an expression. None if some reads cannot be found.
    """
    parent = module.parent(handle)
    match parent:
        case ast.Assign(value=value) | ast.AnnAssign(value=value) if value is handle:
            return [*pmaps.reads_of(module, handle), *_reads_of_instances(module, parent)]
        case ast.Return() | ast.Tuple():
            return _reads_of_results(module, handle)
        case ast.Call() | ast.keyword():
            call = parent if isinstance(parent, ast.Call) else module.parent(parent)
            return _reads_of_parameter(module, handle, call)
    return None


def _reads_of_instances(module: Module, assignment: Any) -> Iterator[ast.expr]:
    """Yield `trainer.update`, where the class of `trainer` sets `self.update` in an assignment."""
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    fields = [target for target in targets if isinstance(target, ast.Attribute)]
    owners = {(field.attr, getattr(module.class_of_self(field), "name", "")) for field in fields}
    for read in module.nodes(ast.Attribute) if owners else ():
        made = module.value(read.value) if isinstance(read.value, ast.Name) else None
        class_name = scopes.last_name(made.func) if isinstance(made, ast.Call) else None
        if class_name and isinstance(read.ctx, ast.Load) and (read.attr, class_name) in owners:
            yield read


def _reads_of_results(module: Module, handle: ast.expr) -> Sequence[ast.expr] | None:
    """Return the reads of `step` of `step, n = make()`, for `handle` in `return handle, n`."""
    calls, index = returned_to(module, handle)
    reads: list[ast.expr] = []
    for call in calls:
        if index is None:
            reads += [call, *pmaps.reads_of(module, call)]
            continue
        parent = module.parent(call)
        targets = parent.targets[0] if isinstance(parent, ast.Assign) else None
        target = functions.part_of(targets, (index,)) if targets is not None else None
        if not isinstance(target, ast.Name):
            return None
        for load in module.reads(module.scope(target), target.id):
            if any(binding.node is target for binding in module.reaching(load) or ()):
                reads.append(load)
    return [read for read in reads if not isinstance(module.parent(read), ast.Assign)] or None


def _reads_of_parameter(module: Module, handle: ast.expr, call: Any) -> Sequence[ast.expr] | None:
    """Return the reads of the parameter to which `call` passes `handle`; None if unknown."""
    parameter = parameter_of(module, handle, call) if isinstance(call, ast.Call) else None
    function: Any = called_function(module, call) if parameter is not None else None
    if (
        parameter is None or len(callers(module, function) or ()) != 1
    ):  # others pass other functions
        return None
    return module.reads(module.scopes.of[function], parameter.arg)


def _parameters(
    module: Module, site: Site, function: Any, calls: Sequence[ast.Call]
) -> tuple[list[str], frozenset[str]]:
    """Return `_argument_names`, which must be the same in all calls; else raise Left."""
    names: list[str] = []
    if function is not None:
        names = [p.arg for p in (*function.args.posonlyargs, *function.args.args)]
        fun, bound = site.fun, 0  # bound: how many parameters the partials around it fill
        while (partial := _partial(module, fun)) is not None:
            fun, bound = partial.args[0], bound + len(partial.args) - 1
        is_method = isinstance(module.parent(function), ast.ClassDef) and names[:1] == ["self"]
        names = names[bound + (is_method and isinstance(fun, ast.Attribute)) :]
    argument_lists = {_argument_names(call, names) for call in calls}
    if len(argument_lists) != 1:
        raise Left("its calls give different arguments", "Give the same arguments in each call.")
    ((parameters, named),) = argument_lists
    return [*parameters], frozenset(named)


def _partial(module: Module, fun: Any) -> ast.Call | None:
    """Return the call of `functools.partial` that a function or its name is; else None."""
    value = module.value(fun) if isinstance(fun, ast.Name) else fun
    if not isinstance(value, ast.Call) or not value.args:
        return None
    return value if module.qualified_name(value.func) == "functools.partial" else None


def _argument_names(
    call: ast.Call, names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters that a call passes, and those it passes by name and out of order.

    Of `f(a, z=b)` for `def f(x, y, z)` these are `("x", "z")` and `("z",)`. Raises Left at `*args`.
    """
    words = tuple(word.arg or "**" for word in call.keywords)
    if "**" in words or any(isinstance(argument, ast.Starred) for argument in call.args):
        raise Left("a call gives arguments by * or **", "Write the arguments out.")
    positional = len(call.args)
    if len(names) < positional:
        names = [*names, *(f"x{position}" for position in range(len(names), positional))]
    is_in_order = words == tuple(names[positional : positional + len(words)])
    return (*names[:positional], *words), () if is_in_order else words


def _literal(node: ast.expr | None, default: Any) -> Any:
    """Return the value of a literal; NotImplemented if the expression is computed."""
    if node is None:
        return default
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NotImplemented


def _flat_in_axes(node: ast.expr | None, count: int) -> list[int | None]:
    """Return in_axes for each of `count` arguments: `0` -> `[0, 0]`. Raises Left for other axes."""
    value = _literal(node, 0)
    axes = [value] * count if value in (0, None) else value
    is_flat = isinstance(axes, tuple | list) and len(axes) == count
    if not is_flat or any(axis not in (0, None) for axis in axes):
        raise Left(
            "in_axes maps another axis than 0, or parts of an argument",
            "Write the specs of such arguments by hand.",
        )
    return [*axes]


def _result_count(module: Module, function: Any, calls: Sequence[ast.Call]) -> int | None:
    """Return the length of the tuple that a function returns; None: no tuple. Raises Left."""
    if function is not None and module.holds(function):
        returned = results_of(function) or ()
        counts = {len(result.elts) if isinstance(result, ast.Tuple) else 0 for result in returned}
        if len(counts) == 1 and counts != {0}:
            return counts.pop()
    unpacked: set[int | None] = set()
    for call in calls:
        match module.parent(call):
            case ast.Expr():  # its results are not kept
                continue
            case ast.Assign(targets=[ast.Tuple(elts=targets), *_]):
                unpacked.add(len(targets))
            case _:
                unpacked.add(None)
    if len(unpacked) > 1:
        raise Left("its calls unpack different numbers of results", "Unpack them alike.")
    return unpacked.pop() if unpacked else None
