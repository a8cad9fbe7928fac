"""The text of mapped functions: `jax.jit(jax.shard_map(...))`, or `jax.jit` with shardings."""

import ast
import itertools
from collections.abc import Sequence
from typing import Any

from jax_dist.lint.findings import Edit
from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.migrate.shard_map.layouts import Layout
from jax_dist.migrate.shard_map.mappings import Pmapped, partial_of
from jax_dist.migrate.shard_map.plan import MigrationPlan
from jax_dist.migrate.shard_map.text import HOLE, Expression, NewCall


class FunctionWriter:
    """Writes the mapped functions of a file.

    A function in `MigrationPlan.plain_jits` becomes `jax.jit` with shardings, any other one
    `jax.jit(jax.shard_map(...))`. In shard_map, a stacked argument has a device axis of size 1,
    which pmap removes: the new body takes `x[0]` of it, and returns `x[None]` of stacked results.
    """

    def __init__(self, plan: MigrationPlan):
        self._plan, self._module, self._writer = plan, plan.module, plan.writer
        self._arrays = f"*{plan.writer.free_name('arrays')}"

    def write(self, mapped: Pmapped) -> None:
        """Replace the call or decorator of pmap by the new text; comments in it move above."""
        site = mapped.site
        if site.form == "call":
            call = self._jit_call(mapped, self._module.text(site.fun))
            self._writer.replace(site.node, self._writer.render(call, site.node))
        else:
            self._write_decorator(mapped)
        self._writer.move_comments(site.node, [*site.arguments.values(), site.fun])

    def _jit_call(self, mapped: Pmapped, fun: str) -> NewCall:
        """Return `jax.jit(jax.shard_map(fun, ...))`, or `jax.jit(fun, in_shardings=..., ...)`."""
        # Its body is `step_on_device` around `fun`, if arrays keep pmap's leading dimension, and
        # `lambda x, rng: fun(x, rng=rng)` if `fun` takes arguments by name only.
        plan, at, is_plain = self._plan, mapped.site.node, mapped in self._plan.plain_jits
        has_stacked = bool(plan.stacked_parameters(mapped)) or any(plan.stacked_results(mapped))
        function: Expression = fun
        if has_stacked and not is_plain:
            function = fun = self._define_on_device(mapped, fun)
        elif mapped.keyword_only:
            call = self._make_call(mapped, fun)
            head = f"lambda {', '.join(mapped.parameters)}: {call.name}"
            function = NewCall(head, call.arguments)
        if mapped.static_argnums and not is_plain:
            function = self._writer.free_name(f"{_base_name(mapped)}_over_devices")
            self._writer.insert_above(at, [self._define_over_devices(mapped, function, fun)])
        elif not is_plain:
            function = self._shard_map_call(mapped, function)
        jit = self._writer.import_name("jax.jit", at)
        return NewCall(jit, [function, *self._jit_options(mapped)])

    def _define_over_devices(self, mapped: Pmapped, name: str, fun: str) -> str:
        """Return `def step(n, *arrays): return jax.shard_map(partial(fun, n), ...)(*arrays)`."""
        # shard_map takes arrays only. If the static `n` is not the first, the function in it is
        # `lambda x: fun(x, n)`, for which all parameters have names: `def step(x, n)`.
        at, names, arrays = mapped.site.node, mapped.parameters, mapped.dynamic_parameters
        static = names[: len(mapped.static_argnums)]
        if names == (*static, *arrays):
            names, arrays = [*static, self._arrays], [self._arrays]
            function = NewCall(self._writer.import_name("functools.partial", at), [fun, *static])
        else:
            fun = f"({fun})" if fun.startswith("lambda") else fun
            function = NewCall(f"lambda {', '.join(arrays)}: {fun}", names)
        call = self._shard_map_call(mapped, function, f"({', '.join(arrays)})")
        return self._writer.define(at, name, names, [("return ", call)])

    def _jit_options(self, mapped: Pmapped) -> list[Expression]:
        """Return the arguments of jit behind the function: `donate_argnums=...` and others."""
        plan, at, options = self._plan, mapped.site.node, list[Expression]()
        if mapped in plan.plain_jits:
            replicated, are_replicated = plan.replicated(at, mapped), self._are_replicated(mapped)
            in_shardings = [replicated if x else plan.sharded(at, mapped) for x in are_replicated]
            options = [_keyword("in_shardings", in_shardings), f"out_shardings={replicated}"]
        donated = mapped.option_texts.get("donate_argnums")
        options += [f"static_argnums={mapped.static_argnums}"] if mapped.static_argnums else []
        options += [f"donate_argnums={donated}"] if donated else []
        return options

    def _are_replicated(self, mapped: Pmapped) -> list[bool]:
        """Return for each argument that is not static whether its layout is REPLICATED."""
        layouts = self._plan.layouts.arguments
        positions = (p for p in range(len(mapped.parameters)) if p not in mapped.static_argnums)
        return [layouts[mapped, position] is Layout.REPLICATED for position in positions]

    def _shard_map_call(self, mapped: Pmapped, fun: Expression, trailer: str = "") -> NewCall:
        """Return `jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("batch")), ...)`."""
        # Without `fun` if that is "", as below a decorator. Each spec is `P()` for a replicated
        # argument or result, and else that of the mapped axis.
        plan, at = self._plan, mapped.site.node
        axis, layouts = plan.axis(mapped), plan.layouts
        spec = lambda is_replicated: self._writer.partition_spec(at, "" if is_replicated else axis)
        in_specs = [spec(is_replicated) for is_replicated in self._are_replicated(mapped)]
        results = (layouts.results[mapped, index] for index in range(mapped.result_count))
        out_specs = [spec(layout is Layout.REPLICATED) for layout in results]
        specs = [_keyword("in_specs", in_specs), _keyword("out_specs", out_specs)]
        options = [f"mesh={plan.mesh(at, mapped).variable}", *specs, "check_vma=False"]
        name = self._writer.import_name("jax.shard_map", at)
        return NewCall(name, [fun, *options] if fun else options, trailer)

    def _define_on_device(self, mapped: Pmapped, fun: str) -> str:
        """Define `def step_on_device(x): return step(x[0])[None]`, and return its name."""
        # `[0]` and `[None]` are put at all leaves of the stacked arguments and results. A random
        # key is one array, of which the call takes the item: `step(state, rng[0])`.
        at, are_stacked = mapped.site.node, self._plan.stacked_results(mapped)
        parameters, body = self._plan.stacked_parameters(mapped), self._lambda_body(mapped)
        trees = [name for name, is_key in parameters.items() if body or not is_key]
        assign = lambda names, value: (f"{', '.join(names)} = ", value)
        lines = [assign(trees, self._take_items(mapped, trees))] if trees else []
        call = body or self._make_call(mapped, fun)
        if all(are_stacked):
            call = self._map_leaves(at, "x[None]", [call])
        elif any(are_stacked):  # `state, loss = step(state)`, then `loss = ...` alone
            names = self._result_names(mapped)
            stacked = [*itertools.compress(names, are_stacked)]
            lines.append(assign(names, call))
            lines.append(assign(stacked, self._map_leaves(at, "x[None]", stacked)))
            call = ", ".join(names)
        lines.append(("return ", call))
        name = self._writer.free_name(f"{_base_name(mapped)}_on_device")
        self._writer.insert_above(at, [self._writer.define(at, name, mapped.parameters, lines)])
        return name

    def _take_items(self, mapped: Pmapped, names: Sequence[str]) -> Expression:
        """Return what `names` are on this device: `rng[0]` of a random key, else of all leaves."""
        if [self._plan.stacked_parameters(mapped)[name] for name in names] == [True]:
            return f"{names[0]}[0]"
        return self._map_leaves(mapped.site.node, "x[0]", names)

    def _map_leaves(self, at: ast.AST, item: str, trees: Sequence[Expression]) -> NewCall:
        """Return `jax.tree.map(lambda x: x[0], (a, b))`, for the item `x[0]` and trees a and b."""
        tree = trees[0] if len(trees) == 1 else NewCall("", trees)
        return NewCall(self._writer.import_name("jax.tree.map", at), [f"lambda x: {item}", tree])

    def _lambda_body(self, mapped: Pmapped) -> str:
        """Return `f(x)` of `pmap(lambda x: f(x))`, if the calls give `x` by position; else ""."""
        fun = mapped.site.fun
        names = [x.arg for x in scopes.parameters(fun.args)] if isinstance(fun, ast.Lambda) else []
        text = self._module.text(fun.body) if names == [*mapped.parameters] else ""
        return "" if "\n" in text else text

    def _make_call(self, mapped: Pmapped, fun: str) -> NewCall:
        """Return the call of the mapped function in a new function with the same parameters."""
        # It is `step(x, rng=rng)`, or `step(cfg, x)` for `partial(step, cfg)`. If the code of the
        # function cannot be repeated there, `step_per_device = fun` above gives it a name.
        node, module, stacked = mapped.site.fun, self._module, self._plan.stacked_parameters(mapped)
        value = lambda name: f"{name}[0]" if stacked.get(name) else name
        arguments = [value(name) for name in mapped.parameters if name not in mapped.keyword_only]
        by_name = {name: value(name) for name in mapped.keyword_only}
        partial = partial_of(module, node) if isinstance(node, ast.Call) else None
        if self._needs_name(mapped):
            name = self._writer.free_name(f"{_base_name(mapped)}_per_device")
            self._writer.insert_above(mapped.site.node, [f"{name} = {fun}", ""])
            fun = name
        elif partial is not None and all(keyword.arg for keyword in partial.keywords):  # no `**`
            fun, *bound = map(module.text, partial.args)
            arguments = [*bound, *arguments]
            by_name = {str(x.arg): module.text(x.value) for x in partial.keywords} | by_name
            if not any(isinstance(x.value, ast.Constant) for x in partial.keywords):
                node = partial.args[0]
        function = pmaps.definition(module, node)  # whose parameters may be in this order
        if isinstance(function, ast.FunctionDef) and not function.decorator_list:
            names = [x.arg for x in (*function.args.posonlyargs, *function.args.args)]
            names = names[len(arguments) :][: len(by_name)]
            in_order = [*arguments, *(by_name.get(name, "") for name in names)]
            # A longer row reads better by name, as does a literal.
            if {*names} == {*by_name} and len(", ".join(in_order)) <= 60:
                arguments, by_name = in_order, {}
        fun = f"({fun})" if fun.startswith("lambda") else fun
        return NewCall(fun, [*arguments, *(f"{k}={v}" for k, v in by_name.items())])

    def _needs_name(self, mapped: Pmapped) -> bool:
        """Return whether the mapped function's code would mean something else in a new function."""
        # So does `step` of `step = pmap(step)`, which is bound anew, and `partial(step, key)` if
        # the new function has a parameter `key`.
        module, fun = self._module, mapped.site.fun
        if isinstance(fun, ast.Lambda | ast.FunctionDef):
            return False
        statement = module.statement(mapped.site.node)
        nodes = ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ()
        targets = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store))
        rebound = {*mapped.parameters, *map(module.text, targets)}  # with another meaning there
        for node in ast.walk(fun):
            if isinstance(node, ast.Name | ast.Attribute) and module.text(node) in rebound:
                lookup = module.scope(node).lookup(node.id) if isinstance(node, ast.Name) else None
                # The code keeps its own variables: `x` of `partial(lambda x: x, key)`.
                if lookup is None or not module.is_inside(lookup[0].node, fun):
                    return True
        return False

    def _result_names(self, mapped: Pmapped) -> list[str]:
        """Return names for the results: those of the targets of a call, or else out0, out1, ..."""
        for call in mapped.calls:
            names = [getattr(x, "id", "") for x, _ in self._plan.variables.find_targets(call)]
            if len(names) == mapped.result_count and all(names) and len({*names}) == len(names):
                return names
        return [f"out{index}" for index in range(mapped.result_count)]

    def _write_decorator(self, mapped: Pmapped) -> None:
        """Replace `@pmap` by `@jax.jit`, with `@partial(jax.shard_map, mesh=..., ...)` below it."""
        at, writer, options = mapped.site.node, self._writer, self._jit_options(mapped)
        jit, partial = (writer.import_name(x, at) for x in ("jax.jit", "functools.partial"))
        text = writer.render(NewCall(partial, [jit, *options]) if options else jit, at)
        if mapped not in self._plan.plain_jits:
            self._write_body(mapped)
            if mapped.static_argnums:
                self._write_static(mapped)
            else:
                shard_map = self._shard_map_call(mapped, "")
                inner = NewCall(partial, [shard_map.name, *shard_map.arguments])
                text += f"\n{writer.indent(mapped.site.fun)}@{writer.render(inner, at)}"
        writer.replace(at, text)

    def _write_static(self, mapped: Pmapped) -> None:
        """Insert `def step(n, *arrays)` below the decorator, and rename the old one to `_step`."""
        function, span, writer = mapped.site.fun, self._module.span, self._writer
        others, (start, _) = function.decorator_list[1:], span(function)
        name, indent = writer.free_name(f"_{function.name}"), writer.indent(function)
        text = self._define_over_devices(mapped, function.name, name).replace("\n", f"\n{indent}")
        text += f"\n\n{indent}" if indent else "\n\n\n"
        above = span(others[0])[0] - len("@") if others else start  # they stay with the old one
        name_start = self._module.source.code.index(function.name.encode(), start + len("def"))
        name_end = name_start + len(function.name.encode())
        writer.edits += [Edit(above, above, text), Edit(name_start, name_end, name)]

    def _write_body(self, mapped: Pmapped) -> None:
        """Insert `x = x[0]` for stacked parameters, and edit `return y` to `return y[None]`."""
        function, at, writer = mapped.site.fun, mapped.site.node, self._writer
        if names := [*self._plan.stacked_parameters(mapped)]:
            has_more = ast.get_docstring(function) is not None and len(function.body) > 1
            first = function.body[has_more]  # behind the docstring
            column, comment = len(writer.indent(first)), "  # of this device"
            target, items = ", ".join(names), self._take_items(mapped, names)
            line = writer.assignment(target, items, column + len(comment)) + comment
            if "\n" in line:  # there is no room for the comment
                line = writer.assignment(target, items, column)
            writer.insert_above(first, [line])
        are_stacked = self._plan.stacked_results(mapped)
        for value in functions.returned_values(function):
            items = value.elts if mapped.tuple_length and isinstance(value, ast.Tuple) else [value]
            for result in itertools.compress(items, are_stacked):
                writer.wrap(result, self._map_leaves(at, "x[None]", [HOLE]))


def _keyword(name: str, specs: Sequence[str]) -> Expression:
    """Return `name=spec` if all specs are equal, else `name=(spec, spec, ...)`."""
    return f"{name}={specs[0]}" if len(set(specs)) == 1 else NewCall(f"{name}=", specs)


def _base_name(mapped: Pmapped) -> str:
    """Return `step` for `self.step` or `partial(step, cfg)`; "step" too for other expressions."""
    target: Any = mapped.site.fun
    inner = target.args[0] if isinstance(target, ast.Call) and target.args else target
    return scopes.last_name(inner) or "step"
