"""Rewrite the mapped functions of a file, and what places and reads their values."""

import ast
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax_dist import _codes
from jax_dist.lint.model import functions, stacking
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import sites
from jax_dist.migrate.places import Left, PlannedPlace, Target
from jax_dist.migrate.shard_map import global_steps, mappings
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.text import Call, Expression, Writer
from jax_dist.migrate.shard_map.values import (
    Definition,
    Use,
    Value,
    Values,
    list_reads,
    parts_of,
    takes_first,
)

_PLACE_BATCH = "jax.make_array_from_process_local_data"
_LONGEST_LAMBDA = 60
_STACKED = '''
def stacked(tree):
{unit}"""Return one copy of each array for each device of this process, stacked."""
{unit}n = jax.local_device_count()
{unit}return jax.tree.map(lambda x: jax.device_get(x)[None].repeat(n, 0), tree)
'''


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """Result of one step on a file."""

    places: list[PlannedPlace]
    fix: Fix | None
    definitions: str  # to be put below the imports
    touched: frozenset[ast.AST]  # what defines and reads values that have another form


def rewrite(
    module: Module,
    target: Target,
    left_lines: Collection[int] = (),
    shard_map_lines: Mapping[int, str] = MappingProxyType({}),
) -> Rewritten:
    """Return the places of a file, and the one fix that migrates those that can be.

    Args:
      module: the file.
      target: "shard_map" or "jit".
      left_lines: the lines of places that stay.
      shard_map_lines: by the lines of places that are not to become `jit` alone, why not; "": the
        text of the step says it.
    """
    mapped: list[Mapped] = []
    places: list[PlannedPlace] = []
    for site in sites.find(module, target):
        place = module, site.reference, _codes.PMAP_CALL
        if not site.is_application:
            continue
        try:
            if module.source.position(module.span(site.reference)[0]).line in left_lines:
                continue
            mapped.append(_checked(module, site))
        except Left as left:
            places.append(PlannedPlace.left(*place, left))
    while True:
        calls = {call: fun.site for fun in mapped for call in fun.calls}
        values = Values(module, calls)
        layouts = Layouts(module, mapped, values)
        stays = [n for n in range(len(mapped)) if not _is_worth_it(mapped[n], n, layouts, values)]
        if not stays:
            break
        for number in reversed(stays):
            site = mapped.pop(number).site
            left = PlannedPlace.left(module, site.reference, _codes.PMAP_CALL, _NOT_SEEN)
            places.append(left)
    writing = _Rewriting(module, mapped, values, layouts)
    if target == "jit":
        writing.find_global_steps(shard_map_lines)
    writing.run()
    writer = writing.writer
    for fun in mapped:
        kind = "jit" if writing.is_global(fun) else "shard_map"
        place = module, fun.site.reference, _codes.PMAP_CALL, None, writing.remark(fun), kind
        places.append(PlannedPlace.done(*place, is_mapped=True))
    if not writer.edits:
        return Rewritten(places, None, "", frozenset())
    imports = tuple(sorted(writer.imports, key=lambda line: (" as " in line, line)))
    fix = Fix("use jax.shard_map", Safety.UNSAFE, writer.all_edits(), imports)
    definitions = "\n\n".join(text.strip("\n") for text in writer.below)
    return Rewritten(places, fix, definitions, frozenset(writing.touched))


_NOT_SEEN = Left(
    "its state keeps the device axis: it is read where that is not seen",
    "Use --to vendored, or replicate the state, and read its first copy, in one function.",
)


def _is_worth_it(mapped: Mapped, number: int, layouts: Layouts, values: Values) -> bool:
    """Return whether an argument loses the axis, or nothing that keeps it is fed back."""
    if layouts.loses_axis(number):
        return True
    values_of_call = [
        values.of(argument)
        for call in mapped.calls
        for position, argument in enumerate(mapped.arguments(call))
        if position not in mapped.static and mapped.axes[position] is not None
    ]
    definitions = [d for value in values_of_call if value for d in value.definitions]
    if any(values.is_of_file(definition) for definition in definitions):
        return False  # a state that functions of the file hand on
    kinds = {definition.kind for definition in definitions}
    return kinds <= {"keys", "result"} or not kinds & {"replicate", "result"}


def _checked(module: Module, site: Site) -> Mapped:
    mapped = mappings.read(module, site)
    if mapped.static and site.form != "call":
        raise Left("a decorator has static arguments", "Map the function below it instead.")
    home = _home(module, site.node)
    if isinstance(home, ast.Module) and b"distributed.initialize" in module.source.code:
        raise Left(
            "it is mapped while the module is imported, before jax.distributed.initialize",
            "Map it inside of a function, then migrate again.",
        )
    devices = mapped.devices
    if devices is not None and isinstance(devices, ast.Name) and module.reaching(devices) is None:
        raise Left("devices= is not seen", "Write the devices out, then migrate again.")
    return mapped


def _home(module: Module, node: ast.AST) -> ast.AST:
    """Return the outermost function around a node; the tree if there is none."""
    home: ast.AST = module.tree
    inner = node
    for around in module.ancestors(node):
        is_function = isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and inner in around.body:  # not one of its decorators
            home = around
        inner = around
    return home


@dataclasses.dataclass(frozen=True, slots=True)
class _Placed:
    """An argument that is placed on the devices: text around a part of it."""

    node: ast.expr
    of: ast.expr
    before: str
    behind: str

    def text(self, module: Module) -> str:
        return f"{self.before}{module.text(self.of)}{self.behind}"


class _Rewriting:
    """The edits of one file."""

    def __init__(
        self,
        module: Module,
        mapped: Sequence[Mapped],
        values: Values,
        layouts: Layouts,
    ):
        self._module = module
        self._mapped, self._values, self._layouts = mapped, values, layouts
        self.writer = Writer(module)
        self.touched: set[ast.AST] = set()
        at_top = (fun for fun in mapped if isinstance(_home(module, fun.site.node), ast.Module))
        self._shared_home = module.tree if any(True for _ in at_top) else None
        named = [fun.axis_name for fun in mapped if fun.axis_name is not None]
        default = module.text(named[0]) if named else '"devices"'
        self._axes = [self._axis(fun, default) for fun in mapped]
        self._numbers = {call: n for n, fun in enumerate(mapped) for call in fun.calls}
        self._replaced: set[ast.AST] = set()
        # By the number of a step over global arrays: its reductions, and their arguments.
        self._reductions: dict[int, list[tuple[ast.Call, ast.expr]]] = {}
        self._reasons: dict[int, str] = {}  # why others are none

    def find_global_steps(self, shard_map_lines: Mapping[int, str]) -> None:
        """Find the mapped functions that become `jax.jit` over global arrays."""
        for number, mapped in enumerate(self._mapped):
            start = self._module.span(mapped.site.reference)[0]
            try:
                line = self._module.source.position(start).line
                if line in shard_map_lines:
                    reason = shard_map_lines[line]
                    raise Left(reason or global_steps.why_it_differs(self._module, mapped))
                keys = [name for name, is_key in self._slices(number, mapped).items() if is_key]
                axis = self._axes[number]
                self._reductions[number] = global_steps.reductions(
                    self._module, mapped, number, self._layouts, axis, keys
                )
            except Left as left:
                self._reasons[number] = left.reason

    def is_global(self, mapped: Mapped) -> bool:
        return self._mapped.index(mapped) in self._reductions

    def remark(self, mapped: Mapped) -> str:
        """Return why a mapped function does not become `jax.jit` alone."""
        reason = self._reasons.get(self._mapped.index(mapped), "")
        return f"not jit alone: {reason}" if reason else ""

    def run(self) -> None:
        gone = {call: of for edits in self._reductions.values() for call, of in edits}
        for call, of in gone.items():
            statement: Any = self._module.parent(call)
            is_own = isinstance(statement, ast.Assign) and len(statement.targets) == 1
            if is_own and self._module.text(statement.targets[0]) == self._module.text(of):
                self._remove(statement)
            else:
                self.writer.around(call, of, "", "")
        for number, mapped in enumerate(self._mapped):
            self._write_mapped(number, mapped)
            for call in mapped.calls:
                self._write_arguments(number, mapped, call)
                self._write_direct_read(mapped, call)
        for value in self._values.all:
            self._write_value(value)
        self.writer.define_meshes()

    # --- meshes

    def _axis(self, mapped: Mapped, default: str) -> str:
        name = mapped.axis_name
        return default if name is None else self._module.text(name)

    def _mesh(self, at: ast.AST, number: int) -> str:
        home = self._shared_home or _home(self._module, at)
        devices = self._devices(self._mapped[number], at)
        return self.writer.mesh(at, self._axes[number], devices, home)

    def _sharded(self, at: ast.AST, number: int) -> str:
        home = self._shared_home or _home(self._module, at)
        return self.writer.sharded(self._mesh(at, number), home)

    def _devices(self, mapped: Mapped, at: ast.AST) -> str:
        """Return the text of a mesh's devices: of devices=, or of what replicates the state."""
        devices = mapped.devices
        if devices is None:
            devices = next(self._devices_of_copies(mapped), None)
        jax_devices = self.writer.name("jax.devices", at)
        match devices:
            case ast.Subscript(value=ast.Call() as call, slice=ast.Slice(lower=None, upper=upper)):
                if upper is not None and stacking.lists_devices(self._module, call):
                    count = self.writer.name("jax.process_count", at)
                    return f"{jax_devices}()[: {self._module.text(upper)} * {count}()]"
        if devices is None or stacking.lists_devices(self._module, devices):
            return f"{jax_devices}()"
        text = self._module.text(devices)
        may_be_none = isinstance(devices, ast.Name | ast.Attribute)
        return f"{jax_devices}() if {text} is None else {text}" if may_be_none else text

    def _devices_of_copies(self, mapped: Mapped) -> Iterator[ast.expr]:
        for call in mapped.calls:
            for argument in mapped.arguments(call):
                value = self._values.of(argument)
                for definition in () if value is None else value.definitions:
                    node = definition.node
                    if isinstance(node, ast.Call) and self._lists_devices(node):
                        yield node.args[1]

    def _lists_devices(self, call: ast.Call) -> bool:
        """Return whether a call replicates its first argument over the devices of its second."""
        names = ("jax.device_put_replicated", "flax.jax_utils.replicate")
        return len(call.args) > 1 and self._module.qualified_name(call.func) in names

    # --- the mapped function

    def _write_mapped(self, number: int, mapped: Mapped) -> None:
        site, module = mapped.site, self._module
        if site.form == "call":
            fun = module.text(site.fun)
            call = self._jitted(number, mapped, fun, site.node)
            comments = [*self.writer.comments(site.node, [site.fun, *site.arguments.values()])]
            self.writer.replace(site.node, self.writer.render(call, site.node))
            self._above(site.node, comments)
        else:
            self._write_decorator(number, mapped)

    def _above(self, node: ast.AST, lines: Sequence[str]) -> None:
        """Put lines above the statement of a node, as far in as that is."""
        if lines:
            start = self._module.span(self._module.statement(node))[0]
            indent = self._indent(node)
            rows = [row for line in lines for row in line.split("\n")]
            if rows[0].startswith("def ") and indent:
                above = start - len(indent) - 1  # the end of the line before
                last = self._module.source.line_text(above).strip()
                if last and last[-1] != ":":
                    self.writer.insert(above + 1, "\n")
            text = "\n".join(f"{indent}{row}" if row else "" for row in rows)
            self.writer.insert(start, f"{text[len(indent) :]}\n{indent}")

    def _specs(self, number: int, mapped: Mapped, at: ast.AST) -> tuple[Expression, Expression]:
        axis = self._axes[number]
        ins = [
            self.writer.spec(at, None if self._is_whole(number, p) else axis)
            for p in range(len(mapped.axes))
            if p not in mapped.static
        ]
        outs = [
            self.writer.spec(at, None if self._layouts.results[number, i] is Layout.WHOLE else axis)
            for i in range(mapped.results or 1)
        ]
        return _one_or_tuple(ins), _one_or_tuple(outs)

    def _is_whole(self, number: int, position: int) -> bool:
        return self._layouts.arguments[number, position] is Layout.WHOLE

    def _jitted(self, number: int, mapped: Mapped, fun: str, at: Any) -> Expression:
        """Return `jax.jit(jax.shard_map(...), donate_argnums=...)`."""
        donated = mapped.site.arguments.get("donate_argnums")
        options: list[Any] = []
        if mapped.static:
            options.append(("static_argnums=", repr(mapped.static)))
            return self._jitted_static(number, mapped, fun, at, options)
        if donated is not None:
            options.append(("donate_argnums=", self._module.text(donated)))
        if number in self._reductions:
            shardings = self._shardings(number, mapped, at)
            fun = self._by_position(mapped, fun)
            return Call(self.writer.name("jax.jit", at), [fun, *shardings, *options])
        body = self._per_device(number, mapped, fun, at)
        shard_map = self._shard_map(number, mapped, body, at)
        return Call(self.writer.name("jax.jit", at), [shard_map, *options])

    def _shardings(self, number: int, mapped: Mapped, at: Any) -> list[tuple[str, Expression]]:
        """Return `in_shardings=..., out_shardings=...`."""
        replicated = self.writer.replicated(at, self._mesh(at, number)).flat()
        ins = [
            replicated if self._is_whole(number, p) else self._sharded(at, number)
            for p in range(len(mapped.axes))
        ]
        return [("in_shardings=", _one_or_tuple(ins)), ("out_shardings=", replicated)]

    def _shard_map(self, number: int, mapped: Mapped, body: str, at: Any) -> Call:
        ins, outs = self._specs(number, mapped, at)
        return Call(
            self.writer.name("jax.shard_map", at),
            [
                *([body] if body else []),
                ("mesh=", self._mesh(at, number)),
                ("in_specs=", ins),
                ("out_specs=", outs),
                ("check_vma=", "False"),
            ],
        )

    def _jitted_static(
        self, number: int, mapped: Mapped, fun: str, at: Any, options: list[Any]
    ) -> Expression:
        """Return the jit of a function that maps for each value of its static arguments."""
        donated = mapped.site.arguments.get("donate_argnums")
        if donated is not None:
            options.append(("donate_argnums=", self._module.text(donated)))
        name = self.writer.free_name(f"{_base_name(mapped, fun)}_over_devices")
        body = self._per_device(number, mapped, fun, at)
        if body == fun:
            dynamic = self._dynamic(mapped)
            body = f"lambda {', '.join(dynamic)}: {_called(fun)}({', '.join(mapped.parameters)})"
        unit = self.writer.unit
        call = self.writer.laid_out(self._shard_map(number, mapped, body, at), unit)
        self._above(
            at,
            [
                f"def {name}({', '.join(mapped.parameters)}):",
                f"{unit}mapped = {call}",
                f"{unit}return mapped({', '.join(self._dynamic(mapped))})",
                "",
            ],
        )
        return Call(self.writer.name("jax.jit", at), [name, *options])

    def _indent(self, at: ast.AST) -> str:
        start = self._module.span(self._module.statement(at))[0]
        return " " * (self._module.source.position(start).column - 1)

    def _dynamic(self, mapped: Mapped) -> list[str]:
        return [name for p, name in enumerate(mapped.parameters) if p not in mapped.static]

    def _per_device(self, number: int, mapped: Mapped, fun: str, at: Any) -> str:
        """Return the function of blocks: `fun`, or one that takes slices out and puts them back."""
        names = mapped.parameters
        dynamic = ", ".join(self._dynamic(mapped))
        taken = self._slices(number, mapped)
        results = [
            self._layouts.results[number, i] is Layout.SLICES for i in range(mapped.results or 1)
        ]
        if not taken and not any(results):
            return self._by_position(mapped, fun)
        tree_map = self.writer.name("jax.tree.map", at)
        keys = {name: f"{name}[0]" for name, is_key in taken.items() if is_key}
        if len(keys) == len(taken) and not any(results):
            call = self._call_of(mapped, fun, [keys.get(name, name) for name in names])
            if len(text := f"lambda {dynamic}: {call.flat()}") <= _LONGEST_LAMBDA:
                return text
        lines = [f"{name} = {text}" for name, text in keys.items()]
        if trees := [name for name in taken if name not in keys]:
            packed = ", ".join(trees)
            of = f"({packed})" if trees[1:] else packed
            lines.append(f"{packed} = {tree_map}(lambda x: x[0], {of})")
        call = self.writer.laid_out(self._call_of(mapped, fun, names), self.writer.unit)
        if all(results):
            lines.append(f"return {tree_map}(lambda x: x[None], {call})")
        elif any(results):
            outs = self._result_names(mapped, names)
            back = [
                f"{tree_map}(lambda x: x[None], {out})" if is_slice else out
                for out, is_slice in zip(outs, results, strict=True)
            ]
            lines += [f"{', '.join(outs)} = {call}", f"return {', '.join(back)}"]
        else:
            lines.append(f"return {call}")
        name = self.writer.free_name(f"{_base_name(mapped, fun)}_on_device")
        body = (f"{self.writer.unit}{line}" for line in lines)
        self._above(at, [f"def {name}({', '.join(names)}):", *body, ""])
        return f"lambda {dynamic}: {name}({', '.join(names)})" if mapped.static else name

    def _by_position(self, mapped: Mapped, fun: str) -> str:
        """Return a function whose arguments may all be given by position."""
        if not mapped.named:
            return fun
        call = self._call_of(mapped, fun, mapped.parameters)
        return f"lambda {', '.join(mapped.parameters)}: {call.flat()}"

    def _call_of(self, mapped: Mapped, fun: str, arguments: Sequence[str]) -> Call:
        """Return the call of a mapped function, or of the function of a partial with keywords."""
        arguments = [
            f"{name}={text}" if name in mapped.named else text
            for name, text in zip(mapped.parameters, arguments, strict=True)
        ]
        node = mapped.site.fun
        match node:
            case ast.Call(args=[inner], keywords=[*words]) if words and all(w.arg for w in words):
                if self._module.qualified_name(node.func) == "functools.partial":
                    more = [self._module.text(word) for word in words]
                    return Call(_called(self._module.text(inner)), [*arguments, *more])
        return Call(_called(fun), arguments)

    def _result_names(self, mapped: Mapped, names: Sequence[str]) -> list[str]:
        """Return names for the results: those that a call gives them, if they are plain."""
        for call in mapped.calls:
            targets = [target for target, _ in self._values.targets(call)]
            texts = [getattr(target, "id", "") for target in targets]
            if len(targets) == mapped.results and all(texts) and len({*texts}) == len(texts):
                return [f"{text}_" if text in names and text == "_" else text for text in texts]
        return [f"out{i}" for i in range(mapped.results or 1)]

    def _slices(self, number: int, mapped: Mapped) -> dict[str, bool]:
        """Return the parameters that get slices, and whether these are keys."""
        return {
            name: all(self._is_keys(mapped.arguments(call)[p]) for call in mapped.calls)
            for p, name in enumerate(mapped.parameters)
            if p not in mapped.static and self._layouts.arguments[number, p] is Layout.SLICES
        }

    def _is_keys(self, node: ast.expr) -> bool:
        value = self._values.of(node)
        if value is not None and isinstance(node, ast.Name):
            kinds = {definition.kind for definition in value.definitions}
            return "keys" in kinds and kinds <= {"keys", "result"}
        stacked = stacking.stacking(self._module, node)
        return stacked is not None and stacked.kind is stacking.Kind.KEYS

    def _write_decorator(self, number: int, mapped: Mapped) -> None:
        """Write the decorators of a function; slices are taken out at the top of its body."""
        site, module = mapped.site, self._module
        function: Any = site.fun
        options: list[Any] = []
        if (donated := site.arguments.get("donate_argnums")) is not None:
            options.append(("donate_argnums=", module.text(donated)))
        at = site.node
        partial = self.writer.name("functools.partial", at)
        if number in self._reductions:
            shardings = self._shardings(number, mapped, at)
            jit = Call(partial, [self.writer.name("jax.jit", at), *shardings, *options])
            self.writer.replace(site.node, self.writer.render(jit, at))
            return
        outer: Expression = self.writer.name("jax.jit", at)
        if options:
            outer = Call(partial, [outer, *options])
        shard_map = self._shard_map(number, mapped, "", at)
        mapping = Call(partial, [shard_map.name, *shard_map.arguments])
        indent = self._indent(function)
        text = f"{self.writer.render(outer, at)}\n{indent}@{self.writer.render(mapping, at)}"
        self.writer.replace(site.node, text)
        self._above_decorators(
            function, [*self.writer.comments(site.node, site.arguments.values())]
        )
        self._write_body(number, mapped, function)

    def _above_decorators(self, function: Any, lines: Sequence[str]) -> None:
        if lines:
            start = self._module.span(function.decorator_list[0])[0] - 1
            indent = self._indent(function)
            self.writer.insert(start, "".join(f"{line}\n{indent}" for line in lines))

    def _write_body(self, number: int, mapped: Mapped, function: Any) -> None:
        tree_map = self.writer.name("jax.tree.map", function)
        taken = {
            name: f"{name}[0]" if is_key else f"{tree_map}(lambda x: x[0], {name})"
            for name, is_key in self._slices(number, mapped).items()
        }
        body = function.body
        is_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        first = body[1] if is_docstring and body[1:] else body[0]
        start = self._module.span(first)[0]
        indent = " " * (self._module.source.position(start).column - 1)
        for name, text in taken.items():
            self.writer.insert(start, f"{name} = {text}  # of this device\n{indent}")
        returned = [n for n in functions.own_nodes(function) if isinstance(n, ast.Return)]
        for statement in returned:
            parts = [statement.value]
            if mapped.results is not None and isinstance(statement.value, ast.Tuple):
                parts = [*statement.value.elts]
            for index, part in enumerate(parts):
                if self._layouts.results[number, index] is Layout.SLICES and part is not None:
                    text = self._module.text(part)
                    self.writer.replace(part, f"{tree_map}(lambda x: x[None], {text})")

    # --- the calls

    def _write_arguments(self, number: int, mapped: Mapped, call: ast.Call) -> None:
        """Place what a call gives, unless it is placed where it is defined."""
        arguments = mapped.arguments(call)
        placed = [
            self._argument(number, mapped, position, argument, call)
            for position, argument in enumerate(arguments)
        ]
        if not any(placed) and not call.keywords:
            return
        if self._is_plain(call, arguments):
            texts = [
                self._module.text(argument) if new is None else new.text(self._module)
                for argument, new in zip(arguments, placed, strict=True)
            ]
            function = self._module.text(call.func)
            text = self.writer.render(Call(function, texts), call)
            start = self._module.span(call.func)[1]
            self.writer.edits.append(Edit(start, self._module.span(call)[1], text[len(function) :]))
            return
        for new in filter(None, placed):
            self.writer.around(new.node, new.of, new.before, new.behind)
        for word in call.keywords:
            start = self._module.span(word)[0]
            self.writer.edits.append(Edit(start, self._module.span(word.value)[0], ""))

    @functools.cached_property
    def _firsts(self) -> set[ast.AST]:
        """Return the reads of one device's copy."""
        return {use.node for value in self._values.all for use in value.uses if use.of}

    def _is_plain(self, call: ast.Call, arguments: Sequence[ast.expr]) -> bool:
        """Return whether no other edits are made inside of the arguments, on one line each."""
        nodes = [node for argument in arguments for node in ast.walk(argument)]
        is_touched = any(
            isinstance(node, ast.Call)
            and (node in self._numbers or any(node is fun.site.node for fun in self._mapped))
            for node in nodes
        )
        has_read = any(node in self._firsts for node in nodes)
        return not (is_touched or has_read or any("\n" in self._module.text(a) for a in arguments))

    def _argument(
        self, number: int, mapped: Mapped, position: int, argument: ast.expr, call: ast.Call
    ) -> "_Placed | None":
        """Return how an argument is placed; None if it stays."""
        layout = self._layouts.arguments.get((number, position))
        is_shared = position in mapped.static or mapped.axes[position] is None
        is_tree = [*parts_of(self._module, argument)] != [argument]
        if is_shared or (is_tree and layout is Layout.WHOLE):
            return None
        value = self._values.of(argument)
        if value is not None and self._is_placed_at_definition(value):
            return None
        stacked = stacking.stacking(self._module, argument)
        if layout is Layout.WHOLE:
            if value is not None or stacked is None:
                return None
            sharding = self.writer.replicated(argument, self._mesh(argument, number))
            put = self.writer.name("jax.device_put", argument)
            return _Placed(argument, stacked.of, f"{put}(", f", {sharding.flat()})")
        inner = stacked.of if layout is Layout.ROWS and stacked is not None else argument
        if inner is argument and self._rebinds(argument, call):
            self._write_above(number, argument)
            return None
        place = self.writer.name(_PLACE_BATCH, argument)
        before = f"{place}({self._sharded(argument, number)}, {self._flattened(number, layout)}"
        return _Placed(argument, inner, before, "))" if before.endswith("), ") else ")")

    def _flattened(self, number: int, layout: Layout | None) -> str:
        """Return what merges the slices of a batch into rows, for a step over global arrays."""
        if number not in self._reductions or layout is not Layout.SLICES:
            return ""
        return "jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), "

    def _is_placed_at_definition(self, value: Value) -> bool:
        """Return whether a value is placed where it is defined, and not where it is used."""
        if self._layouts.of_value(value) is not Layout.SLICES:
            return True
        if _has_results(value):
            return True
        if any(self._numbers[use.call] in self._reductions for use in value.uses if use.call):
            return False
        is_made = all(_is_expression(definition.node) for definition in value.definitions)
        return is_made and all(map(self._is_mapped_argument, value.uses))

    def _is_mapped_argument(self, use: Use) -> bool:
        if use.kind != "argument" or use.call is None:
            return False
        mapped = self._mapped[self._numbers[use.call]]
        return use.position not in mapped.static and mapped.axes[use.position] is not None

    def _write_direct_read(self, mapped: Mapped, call: ast.Call) -> None:
        """Write `unreplicate(f(x))` as `f(x)`."""
        number = self._numbers[call]
        parent: Any = self._module.parent(call)
        if mapped.results is not None or self._layouts.results[number, 0] is not Layout.WHOLE:
            return
        if isinstance(parent, ast.Call) and takes_first(self._module, parent) is call:
            self._write_first(parent, call)

    def _write_placed(self, number: int, node: Any, of: Any) -> None:
        """Write rows or slices of this process as part of a global array."""
        if any(part in self._replaced for part in (*ast.walk(node), *self._module.ancestors(node))):
            return
        self._replaced.add(node)
        place = self.writer.name(_PLACE_BATCH, node)
        sharded = self._sharded(node, number)
        self.writer.wrap(node, of, place, first=sharded)

    def _write_above(self, number: int, name: ast.expr) -> None:
        """Place what a name holds in a line above."""
        place = self.writer.name(_PLACE_BATCH, name)
        sharded = self._sharded(name, number)
        text = self._module.text(name)
        flat = self._flattened(number, Layout.SLICES)
        self._above(name, [f"{text} = {place}({sharded}, {flat}{text}{')' * bool(flat)})"])

    def _write_copies(self, number: int, node: Any, stacked: Any) -> None:
        if node in self._replaced or stacked is None:
            return
        self._replaced.add(node)
        put = self.writer.name("jax.device_put", node)
        sharding = self.writer.replicated(node, self._mesh(node, number))
        self.writer.wrap(node, stacked.of, put, last=sharding.flat())

    def _write_first_copy(self, number: int, node: Any) -> None:
        """Write what other code makes of stacked copies as one value."""
        if node in self._replaced:
            return
        self._replaced.add(node)
        tree_map = self.writer.name("jax.tree.map", node)
        sharding = self.writer.replicated(node, self._mesh(node, number))
        before = f"{self.writer.name('jax.device_put', node)}({tree_map}(lambda x: x[0], "
        start, end = self._module.span(node)
        self.writer.insert(start, before)
        self.writer.insert(end, f"), {sharding.flat()})")

    def _rebinds(self, node: ast.expr, call: ast.Call) -> bool:
        """Return whether a name may be set to what is placed, above its only use."""
        value = self._values.of(node)
        statement = self._module.statement(call)
        is_plain = isinstance(node, ast.Name) and isinstance(statement, ast.Assign | ast.Expr)
        return value is not None and is_plain and len(value.uses) == 1

    # --- values

    def _write_value(self, value: Value) -> None:
        layout, number = self._layouts.of_value(value), self._number(value)
        if number is None:
            return
        if layout is not Layout.SLICES:
            self.touched |= {use.node for use in value.uses}
            self.touched |= {definition.node for definition in value.definitions}
        for definition in value.definitions:
            self._write_definition(value, layout, number, definition)
        if layout is Layout.WHOLE:
            donated = self._is_donated(value)
            for use in value.uses:
                self._write_use(use, is_donated=donated)

    def _write_definition(
        self, value: Value, layout: Layout, number: int, definition: Definition
    ) -> None:
        node: Any = definition.node
        if layout is Layout.WHOLE and definition.kind == "replicate":
            self._write_copies(number, node, stacking.stacking(self._module, node))
        elif layout is Layout.WHOLE and definition.kind == "unknown":
            self._write_first_copy(number, node)
        elif layout is Layout.ROWS and definition.kind == "rows":
            self._write_placed(number, node, definition.of)
        elif (
            layout is Layout.SLICES
            and self._is_placed_at_definition(value)
            and _is_expression(node)
            and (definition.kind == "keys" or not _has_results(value))
        ):
            self._write_placed(number, node, node)

    def _number(self, value: Value) -> int | None:
        """Return the number of the first mapped function that a value goes through."""
        calls = [use.call for use in value.uses if use.call is not None]
        calls += [d.call for d in value.definitions if d.call is not None]
        return min((self._numbers[call] for call in calls), default=None)

    def _is_donated(self, value: Value) -> bool:
        for use in value.uses:
            if use.call is not None:
                mapped = self._mapped[self._numbers[use.call]]
                donated = mapped.site.arguments.get("donate_argnums")
                try:
                    positions = ast.literal_eval(donated) if donated is not None else ()
                except ValueError:
                    return True
                if use.position in (
                    positions if isinstance(positions, tuple | list) else [positions]
                ):
                    return True
        return False

    def _write_use(self, use: Use, *, is_donated: bool) -> None:
        if use.kind == "first" and use.of is not None:
            self._write_first(use.node, use.of, is_donated=is_donated)
        elif use.kind == "listed":
            call: Any = self._module.parent(use.node)
            for read in list_reads(self._module, call.func.value) or ():
                self._write_list_read(read)
        elif use.kind == "unknown" and use.node not in self._replaced:
            self._replaced.add(use.node)
            name = "stacked"
            self.writer.below[_STACKED.format(unit=self.writer.unit)] = None
            self.writer.name("jax", use.node)
            self.writer.replace(use.node, f"{name}({self._module.text(use.node)})")

    def _write_list_read(self, read: Any) -> None:
        if read in self._replaced:
            return
        self._replaced.add(read)
        stack = self._module.text(read.func).replace("get_metrics", "stack_forest")
        get = self.writer.name("jax.device_get", read)
        self.writer.replace(read, f"{stack}({get}({self._module.text(read.args[0])}))")

    def _write_first(self, node: Any, of: Any, *, is_donated: bool = False) -> None:
        """Write the first copy of a whole value as the value."""
        if node in self._replaced:
            return
        self._replaced.add(node)
        module, text = self._module, self._module.text(of)
        parent = module.parent(node)
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            target = module.text(parent.targets[0])
            if target == text and module.parent(parent) is not module.tree:
                body = getattr(module.parent(parent), "body", ())
                if len(body) > 1 and parent in body:
                    self._remove(parent)
                    return
            elif is_donated and target != text:
                tree_map = self.writer.name("jax.tree.map", node)
                copy = self.writer.name("jax.numpy.copy", node)
                self.writer.around(node, of, f"{tree_map}({copy}, ", ")")
                return
        self.writer.around(node, of, "", "")

    def _remove(self, statement: Any) -> None:
        """Remove a statement with its line."""
        before, behind = self._module.margins(statement)
        if before.strip() or behind.strip():
            self.writer.replace(statement, "pass")
        else:
            self.writer.edits.append(self._module.line_edit(statement))


def _has_results(value: Value) -> bool:
    return any(definition.kind == "result" for definition in value.definitions)


def _one_or_tuple(specs: Sequence[str]) -> Expression:
    if len(set(specs)) == 1:
        return specs[0]
    return Call("", list(specs))


def _called(fun: str) -> str:
    """Return a function's text as it is called."""
    return f"({fun})" if fun.startswith("lambda") else fun


def _base_name(mapped: Mapped, fun: str) -> str:
    name = fun.rpartition(".")[2]
    if name.isidentifier():
        return name
    target = mapped.site.fun
    inner = target.args[0] if isinstance(target, ast.Call) and target.args else None
    last = getattr(inner, "id", getattr(inner, "attr", ""))
    return last or "step"


def _is_expression(node: ast.AST) -> bool:
    return isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
