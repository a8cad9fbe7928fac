"""The mapped functions of a file: how they are mapped, and all their calls."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import CannotMigrate
from jax_dist.migrate.shard_map import flow

_OPTIONS = frozenset(
    ("axis_name", "in_axes", "out_axes", "static_broadcasted_argnums", "donate_argnums", "devices")
)
# The names of parameters, and of those that are passed by name and not in their order.
_Parameters: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
_COMPUTED = object()  # the value of an expression that is no literal


@dataclasses.dataclass(slots=True, eq=False)
class Pmapped:
    """One function that pmap maps: the call or decorator of pmap, and all calls of the result."""

    site: Site
    option_texts: dict[str, str]  # of the arguments of pmap, as this file would write them
    calls: list[ast.Call]
    parameters: tuple[str, ...]  # the names of the arguments in all calls, in their order
    in_axes: list[int | None]  # for each parameter
    static_argnums: tuple[int, ...]
    keyword_only: tuple[str, ...]  # parameters that are passed by name only
    tuple_length: int | None  # of what it returns; None: it returns no tuple
    out_axes: int | tuple[int | None, ...] | None

    @property
    def result_count(self) -> int:
        """Return the number of results, each with its own spec."""
        return self.tuple_length or 1

    @property
    def dynamic_parameters(self) -> list[str]:
        """Return the parameters that are not static, in order."""
        return [name for p, name in enumerate(self.parameters) if p not in self.static_argnums]

    def is_mapped(self, position: int) -> bool:
        """Return whether pmap maps over an argument: it is neither static nor broadcast."""
        return position not in self.static_argnums and self.in_axes[position] is not None

    def donates(self, position: int) -> bool:
        """Return whether an argument may be donated; True if donate_argnums is computed."""
        donated = _literal(self.site.arguments.get("donate_argnums"), ())
        if isinstance(donated, tuple | list):
            return position in donated
        return donated is _COMPUTED or donated == position

    def mapped_arguments(self, call: ast.Call) -> list[ast.expr]:
        """Return the arguments of a call that pmap maps over."""
        return [node for n, node in enumerate(self.arguments(call)) if self.is_mapped(n)]

    def arguments(self, call: ast.Call) -> list[ast.expr]:
        """Return the arguments of a call, in the order of the parameters."""
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        return [*call.args, *(by_name[name] for name in self.parameters[len(call.args) :])]


def read_mapped_function(module: Module, site: Site) -> Pmapped:
    """Return the function that pmap maps at a site. Raises CannotMigrate if shard_map cannot."""
    options = site.arguments  # of pmap, by name
    if site.unknown:
        raise CannotMigrate(f"its arguments are given by {site.unknown}", "Write them out first.")
    if unknown := sorted({*options} - _OPTIONS):
        raise CannotMigrate(f"{unknown[0]} has no counterpart", f"Leave {unknown[0]} out.")
    calls = _calls_of(module, site)
    function = functions.innermost(module, site.fun) or pmaps.definition(module, site.fun)
    parameters, keyword_only = _parameters(module, site, function, calls)
    static = _static_argnums(module, site)
    if keyword_only and (static or site.form != "call"):
        raise CannotMigrate("a call gives arguments by name", "Give them by position.")
    in_axes = _flat_in_axes(options.get("in_axes"), len(parameters) - len(keyword_only))
    in_axes += [0] * len(keyword_only)  # as pmap maps keywords, whatever in_axes says
    out_axes = _literal(options.get("out_axes"), 0)
    axes = out_axes if isinstance(out_axes, tuple) else (out_axes,)
    if any(axis not in (0, None) for axis in axes):
        raise CannotMigrate("out_axes places the mapped axis elsewhere", "Transpose the results.")
    tuple_length = _tuple_length(module, function, calls)  # None: one result, and no tuple
    is_none = lambda node: isinstance(node, ast.Constant) and node.value is None
    nodes = {name: node for name, node in options.items() if not is_none(node)}
    option_texts = {name: _option_text(module, node) for name, node in nodes.items()}
    return Pmapped(
        site, option_texts, calls, parameters, in_axes, static, keyword_only, tuple_length, out_axes
    )


def _static_argnums(module: Module, site: Site) -> tuple[int, ...]:
    """Return static_broadcasted_argnums. Raises CannotMigrate if computed, or for a method."""
    numbers: Any = _literal(site.arguments.get("static_broadcasted_argnums"), ())
    if numbers is _COMPUTED:
        raise CannotMigrate("static_broadcasted_argnums is computed", "Write its numbers out.")
    static = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if static and site.form != "call":
        is_method = isinstance(module.parent(site.fun), ast.ClassDef)
        if is_method or site.fun.decorator_list[0] is not site.node:
            raise CannotMigrate("a decorator has static arguments", "Map the function below it.")
    return static


def _option_text(module: Module, node: ast.expr) -> str:
    """Return the code of an argument of pmap. Raises CannotMigrate if other files compute it."""
    if module.holds(node):
        return module.text(node)
    if _literal(node, None) is _COMPUTED:
        raise CannotMigrate("its arguments are given in another file", "Write them out here.")
    return ast.unparse(node)


def _calls_of(module: Module, site: Site) -> list[ast.Call]:
    """Return all calls of a mapped function. Raises CannotMigrate if other files may call it."""
    # From `pmap(f)`, they are found through the names, fields, parameters and results that hold it.
    calls: set[ast.Call] = set()
    handles = [*pmaps.find_results(module, site)]  # expressions whose value is the mapped function
    for handle in handles:
        call = module.call_of(handle)
        if call is not None:
            calls.add(call)
            continue
        reads = find_reads(module, handle)
        if reads is None:
            line = module.source.position(module.span(handle)[0]).line
            by_hand = f"Call it in this file only; line {line} hands it on."
            raise CannotMigrate("the mapped function goes where its calls are not seen", by_hand)
        handles += [read for read in reads if read not in handles]
    if calls:
        return sorted(calls, key=scopes.place)
    by_hand = "Place the state and the batches by hand where it is called, or use --to vendored."
    raise CannotMigrate("its calls are not in this file", by_hand)


def find_reads(module: Module, handle: ast.expr) -> Sequence[ast.expr] | None:
    """Return what reads the mapped function that an expression `handle` hands on, if known."""
    # For `step = handle`, the reads of `step`; for `f(handle)`, those of the parameter in `def f`;
    # for `return handle` in `def make`, those of `step` in `step = make()`.
    match module.parent(handle):
        case (ast.Assign(value=value) | ast.AnnAssign(value=value)) as parent if value is handle:
            return [*pmaps.reads_of(module, handle), *_reads_of_instances(module, parent)]
        case ast.Return() | ast.Tuple():
            return _reads_of_results(module, handle)
        case ast.Call() as call:
            return _reads_of_parameter(module, handle, call)
        case ast.keyword() as keyword:
            return _reads_of_parameter(module, handle, module.parent(keyword))
    return None


def _reads_of_instances(module: Module, assignment: Any) -> Iterator[ast.expr]:
    """Yield the reads `trainer.step` for an assignment `self.step = ...` in `class Trainer`."""
    targets = [x for x in ast.walk(assignment) if isinstance(getattr(x, "ctx", None), ast.Store)]
    fields = [target for target in targets if isinstance(target, ast.Attribute)]
    class_names = {x.attr: getattr(module.class_of_self(x), "name", "") for x in fields}
    for read in module.nodes(ast.Attribute):
        made = module.value(read.value) if isinstance(read.ctx, ast.Load) else None
        name = scopes.last_name(made.func) if isinstance(made, ast.Call) else ""
        if name and name == class_names.get(read.attr):
            yield read


def _reads_of_results(module: Module, handle: ast.expr) -> Sequence[ast.expr] | None:
    """Return the reads of what a function with `return handle` returns; None if unknown."""
    # For `return handle, n` in `def make` and `step, n = make()`, these are the reads of `step`.
    calls, index = flow.find_calls_returning(module, handle)  # `make()` and 0, None without tuple
    reads: list[ast.expr] = []
    for call in calls:
        if index is None:  # `make()(x)`, or `step = make()`
            reads += [call, *pmaps.reads_of(module, call)]
            continue
        parent = module.parent(call)
        targets = parent.targets[0] if isinstance(parent, ast.Assign) else call
        target = functions.part_of(targets, (index,))  # `step` of `step, n`
        if not isinstance(target, ast.Name):
            return None
        for read in module.reads(module.scope(target), target.id):
            if any(binding.node is target for binding in module.reaching(read) or ()):
                reads.append(read)
    # Not `other = step`: the reads of `other` would have to be followed.
    return [read for read in reads if not isinstance(module.parent(read), ast.Assign)] or None


def _reads_of_parameter(module: Module, handle: ast.expr, call: Any) -> Sequence[ast.expr] | None:
    """Return the reads of `p` in `def f(p)` for `f(handle)`, the only call of `f`; else None."""
    parameter = flow.parameter_of(module, handle, call)
    function: Any = flow.called_function(module, call)
    if parameter is None or len(flow.find_all_calls(module, function) or ()) != 1:
        return None
    return module.reads(module.scopes.of[function], parameter.arg)


def _parameters(module: Module, site: Site, function: Any, calls: list[ast.Call]) -> _Parameters:
    """Return the parameters of a mapped function that its calls pass; see `_passed_parameters`."""
    # `function` is its def, or None if that is elsewhere. Raises CannotMigrate if calls differ.
    names: list[str] = []
    if function is not None:
        names = [p.arg for p in (*function.args.posonlyargs, *function.args.args)]
        fun, filled = site.fun, 0  # how many of them are passed already, as by `partial(step, cfg)`
        while (partial := partial_of(module, fun)) is not None:
            fun, filled = partial.args[0], filled + len(partial.args[1:])
        is_method = isinstance(module.parent(function), ast.ClassDef) and names[:1] == ["self"]
        if is_method and isinstance(fun, ast.Attribute):  # `self.step` passes `self`
            filled += 1
        names = names[filled:]
    passed = {_passed_parameters(call, names) for call in calls}
    if len(passed) != 1:
        raise CannotMigrate("its calls give different arguments", "Give the same in each call.")
    return passed.pop()


def partial_of(module: Module, fun: Any) -> ast.Call | None:
    """Return the call of `functools.partial` that a function or its name is; else None."""
    value = module.value(fun) if isinstance(fun, ast.Name) else fun
    if not isinstance(value, ast.Call) or not value.args:
        return None
    return value if module.qualified_name(value.func) == "functools.partial" else None


def _passed_parameters(call: ast.Call, names: Sequence[str]) -> _Parameters:
    """Return the names of the parameters that a call passes, and those that stay keywords."""
    # For a function with the parameters `names`, x, y and z, `f(a, y=b)` passes x and y in order:
    # `(("x", "y"), ())`, for both can go by position. `f(a, z=b)` leaves y out, so that z stays a
    # keyword: `(("x", "z"), ("z",))`. Raises CannotMigrate at `*args`.
    keywords = tuple(keyword.arg or "**" for keyword in call.keywords)
    if "**" in keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
        raise CannotMigrate("a call gives arguments by * or **", "Write the arguments out.")
    count = len(call.args)
    names = [*names, *(f"x{position}" for position in range(len(names), count))]  # of `*args`
    is_in_order = keywords == tuple(names[count : count + len(keywords)])
    return (*names[:count], *keywords), () if is_in_order else keywords


def _literal(node: ast.expr | None, default: Any) -> Any:
    """Return the value of a literal; `_COMPUTED` for other expressions."""
    if node is None:
        return default
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _COMPUTED


def _flat_in_axes(node: ast.expr | None, count: int) -> list[int | None]:
    """Return in_axes for each argument, `[0, 0]` for `0`. Raises CannotMigrate for nested ones."""
    value = _literal(node, 0)
    axes = [value] * count if value in (0, None) else value
    is_flat = isinstance(axes, tuple | list) and len(axes) == count
    if not is_flat or any(axis not in (0, None) for axis in axes):
        reason = "in_axes maps another axis than 0, or parts of an argument"
        raise CannotMigrate(reason, "Write the specs of such arguments by hand.")
    return [*axes]


def _tuple_length(module: Module, function: Any, calls: Sequence[ast.Call]) -> int | None:
    """Return the length of the tuple that a function returns, by its `return x, y` or its calls."""
    # None if it returns one value. Raises CannotMigrate if calls differ: `x, y = f()`, `x = f()`.
    if function is not None and module.holds(function):
        results = flow.results_of(function)
        lengths = {len(x.elts) if isinstance(x, ast.Tuple) else 0 for x in results}
        if len(lengths) == 1 and lengths != {0}:
            return lengths.pop()
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
        raise CannotMigrate("its calls unpack different numbers of results", "Unpack them alike.")
    return unpacked.pop() if unpacked else None
