"""The text of mapped functions: `jax.jit(jax.shard_map(...))`, or `jax.jit` with shardings."""

import ast
import itertools
from collections.abc import Sequence
from typing import Any

from jax_dist.lint.model import functions, scopes
from jax_dist.migrate.shard_map.layouts import Layout
from jax_dist.migrate.shard_map.mappings import Pmapped, partial_of
from jax_dist.migrate.shard_map.plan import MigrationPlan
from jax_dist.migrate.shard_map.text import Expression, NewCall


class FunctionWriter:
    """Writes the mapped functions of a file.

    A function in `MigrationPlan.plain_jits` becomes `jax.jit` with shardings, any other one
    `jax.jit(jax.shard_map(...))`. In shard_map, a stacked argument has a device axis of size 1,
    which pmap removes: the new body takes `x[0]` of it, and returns `x[None]` of stacked results.
    """

    def __init__(self, plan: MigrationPlan):
        self._plan, self._module, self._writer = plan, plan.module, plan.writer

    def write(self, mapped: Pmapped) -> None:
        """Replace the call or decorator of pmap by the new text; comments in it move above."""
        site = mapped.site
        kept = [*site.arguments.values()]
        if site.form == "call":
            kept.append(site.fun)
            call = self._jit_call(mapped, self._module.text(site.fun))
            self._writer.replace(site.node, self._writer.render(call, site.node))
        elif mapped in self._plan.plain_jits:
            self._write_decorator(mapped)
        elif mapped.static_argnums:
            self._write_call_below(mapped)
        else:
            self._write_decorator(mapped)
            self._write_body(mapped)
        self._writer.insert_above(site.node, self._writer.comments(site.node, kept))

    def _jit_call(self, mapped: Pmapped, fun: str) -> NewCall:
        """Return `jax.jit(jax.shard_map(fun, ...))`, or `jax.jit(fun, in_shardings=..., ...)`."""
        # shard_map takes arrays only: for the static `n` of `step(x, n)`, this defines a function
        # `step_over_devices(x, n)` with `mapped = jax.shard_map(lambda x: step(x, n), ...)`.
        at = mapped.site.node
        if mapped in self._plan.plain_jits:
            function = self._pass_by_position(mapped, fun)
        else:
            function = self._shard_map_call(mapped, self._make_body(mapped, fun))
            if mapped.static_argnums:
                call = NewCall("mapped", mapped.dynamic_parameters)  # those that are not static
                lines = [("mapped = ", function), ("return ", call)]
                function = self._writer.free_name(f"{_base_name(mapped, fun)}_over_devices")
                self._writer.define(at, function, mapped.parameters, lines)
        jit = self._writer.import_name("jax.jit", at)
        return NewCall(jit, [function, *self._jit_options(mapped)])

    def _jit_options(self, mapped: Pmapped) -> list[Expression]:
        """Return the arguments of jit behind the function: `donate_argnums=...` and others."""
        options: list[Expression] = []
        if mapped in self._plan.plain_jits:  # a jit without shard_map
            plan, at = self._plan, mapped.site.node
            replicated = plan.replicated(at, mapped)  # the code of a sharding
            are_replicated = self._replicated_arguments(mapped)
            in_shardings = [replicated if x else plan.sharded(at, mapped) for x in are_replicated]
            options += [_keyword("in_shardings", in_shardings), f"out_shardings={replicated}"]
        if mapped.static_argnums:
            options.append(f"static_argnums={mapped.static_argnums}")
        if "donate_argnums" in mapped.option_texts:
            options.append(f"donate_argnums={mapped.option_texts['donate_argnums']}")
        return options

    def _replicated_arguments(self, mapped: Pmapped) -> list[bool]:
        """Return for each argument that is not static whether its layout is REPLICATED."""
        layouts = self._plan.layouts.arguments
        positions = (p for p in range(len(mapped.parameters)) if p not in mapped.static_argnums)
        return [layouts[mapped, position] is Layout.REPLICATED for position in positions]

    def _shard_map_call(self, mapped: Pmapped, function: Expression) -> NewCall:
        """Return `jax.shard_map(function, mesh=mesh, in_specs=(P(), P("batch")), ...)`."""
        # Without the function if that is "", as below a decorator. Each spec is `P()` for a
        # replicated argument or result, and else that of the mapped axis.
        plan, at = self._plan, mapped.site.node
        axis, layouts = plan.axis(mapped), plan.layouts
        spec = lambda is_replicated: self._writer.partition_spec(at, "" if is_replicated else axis)
        in_specs = [spec(is_replicated) for is_replicated in self._replicated_arguments(mapped)]
        results = (layouts.results[mapped, index] for index in range(mapped.result_count))
        out_specs = [spec(layout is Layout.REPLICATED) for layout in results]
        options: list[Expression] = [
            f"mesh={plan.mesh(at, mapped).variable}",
            _keyword("in_specs", in_specs),
            _keyword("out_specs", out_specs),
            "check_vma=False",
        ]
        name = self._writer.import_name("jax.shard_map", at)
        return NewCall(name, [function, *options] if function else options)

    def _make_body(self, mapped: Pmapped, fun: str) -> Expression:
        """Return the function for shard_map: `fun`, or one around it that takes its arrays only."""
        # It is `step_on_device`, defined above, if arrays keep pmap's leading dimension, and with
        # static arguments `partial(fun, config)`, or `lambda x: fun(x, config)` behind others.
        static = mapped.static_argnums
        is_stacked = bool(self._plan.stacked_parameters(mapped))
        if is_stacked or any(self._plan.stacked_results(mapped)):
            is_stacked, fun = True, self._define_on_device(mapped, fun)
        if not static:
            return fun if is_stacked else self._pass_by_position(mapped, fun)
        if static == (*range(len(static)),):
            partial = self._writer.import_name("functools.partial", mapped.site.node)
            return NewCall(partial, [fun, *mapped.parameters[: len(static)]])
        head = f"lambda {', '.join(mapped.dynamic_parameters)}: {_callee(fun)}"
        return NewCall(head, mapped.parameters)

    def _define_on_device(self, mapped: Pmapped, fun: str) -> str:
        """Define `def step_on_device(x): return step(x[0])[None]`, and return its name."""
        # `[0]` and `[None]` are put at all leaves of the stacked arguments and results.
        at, are_stacked = mapped.site.node, self._plan.stacked_results(mapped)
        parameters = self._plan.stacked_parameters(mapped)  # by name: whether it is a random key
        tree_map = self._writer.import_name("jax.tree.map", at)

        def map_leaves(index: str, trees: Sequence[str]) -> tuple[str, Expression]:
            """Return `a, b = ` and `jax.tree.map(lambda x: x[0], (a, b))`."""
            tree = trees[0] if len(trees) == 1 else NewCall("", trees)
            return f"{', '.join(trees)} = ", NewCall(tree_map, [f"lambda x: x[{index}]", tree])

        lines: list[tuple[str, Expression]] = [  # the beginning of each, and its expression
            (f"{name} = ", f"{name}[0]") for name, is_key in parameters.items() if is_key
        ]
        if trees := [name for name, is_key in parameters.items() if not is_key]:
            lines.append(map_leaves("0", trees))
        call = self._lambda_body(mapped) or self._make_call(mapped, fun)
        if all(are_stacked):
            lines.append(("return ", NewCall(tree_map, ["lambda x: x[None]", call])))
        elif any(are_stacked):  # `state, loss = step(state)`, then `loss = ...` alone
            names = self._result_names(mapped)
            stacked = [*itertools.compress(names, are_stacked)]
            lines += [(f"{', '.join(names)} = ", call), map_leaves("None", stacked)]
            lines.append(("return ", ", ".join(names)))
        else:
            lines.append(("return ", call))
        name = self._writer.free_name(f"{_base_name(mapped, fun)}_on_device")
        self._writer.define(at, name, mapped.parameters, lines)
        return name

    def _pass_by_position(self, mapped: Pmapped, fun: str) -> Expression:
        """Return `fun`, or `lambda x, rng: fun(x, rng=rng)` if it takes arguments by name only."""
        if not mapped.keyword_only:
            return fun
        call = self._make_call(mapped, fun)
        return NewCall(f"lambda {', '.join(mapped.parameters)}: {call.name}", call.arguments)

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
        arguments = [
            f"{name}={name}" if name in mapped.keyword_only else name for name in mapped.parameters
        ]
        if self._needs_name(mapped):
            name = self._writer.free_name(f"{_base_name(mapped, fun)}_per_device")
            self._writer.insert_above(mapped.site.node, [f"{name} = {fun}", ""])
            return NewCall(name, arguments)
        node, text = mapped.site.fun, self._module.text
        partial = partial_of(self._module, node) if isinstance(node, ast.Call) else None
        if partial is not None and all(keyword.arg for keyword in partial.keywords):  # no `**`
            fun, *bound = map(text, partial.args)
            arguments = [*bound, *arguments, *map(text, partial.keywords)]
        return NewCall(_callee(fun), arguments)

    def _needs_name(self, mapped: Pmapped) -> bool:
        """Return whether the mapped function's code would mean something else in a new function."""
        # So does `step` of `step = pmap(step)`, which is bound anew, and `partial(step, key)` if
        # the new function has a parameter `key`.
        module, fun = self._module, mapped.site.fun
        if isinstance(fun, ast.Lambda | ast.FunctionDef):
            return False
        statement = module.statement(mapped.site.node)
        rebound = {*mapped.parameters}  # names with another meaning there
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            names = (n for n in ast.walk(statement) if isinstance(n, ast.Name | ast.Attribute))
            rebound |= {module.text(name) for name in names if isinstance(name.ctx, ast.Store)}
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
            targets = [target for target, _ in self._plan.variables.find_targets(call)]
            names = [getattr(target, "id", "") for target in targets]
            if len(names) == mapped.result_count and all(names) and len({*names}) == len(names):
                return names
        return [f"out{index}" for index in range(mapped.result_count)]

    def _write_decorator(self, mapped: Pmapped) -> None:
        """Replace `@pmap` by `@jax.jit`, with `@partial(jax.shard_map, mesh=..., ...)` below it."""
        at, writer, options = mapped.site.node, self._writer, self._jit_options(mapped)
        partial = writer.import_name("functools.partial", at)
        jit = writer.import_name("jax.jit", at)
        text = writer.render(NewCall(partial, [jit, *options]) if options else jit, at)
        if mapped not in self._plan.plain_jits:  # a plain jit has no shard_map
            shard_map = self._shard_map_call(mapped, "")
            inner = NewCall(partial, [shard_map.name, *shard_map.arguments])
            text += f"\n{writer.indent(mapped.site.fun)}@{writer.render(inner, at)}"
        writer.replace(at, text)

    def _write_call_below(self, mapped: Pmapped) -> None:
        """Edit `@partial(pmap, static_broadcasted_argnums=0)` on `def step` to `def _step`."""
        # Below it, `step = jax.jit(_step_over_devices, static_argnums=(0,))`.
        writer, function = self._writer, mapped.site.fun
        name = writer.free_name(f"_{function.name}")
        writer.undecorate(function, name)
        call = self._jit_call(mapped, name)
        indent = writer.indent(function)
        text = writer.assignment(function.name, call, len(indent), indent)
        blank = "\n\n" if indent else "\n\n\n"
        writer.insert(self._module.span(function)[1], f"{blank}{indent}{text}")

    def _write_body(self, mapped: Pmapped) -> None:
        """Insert `x = x[0]` for stacked parameters, and edit `return y` to `return y[None]`."""
        # For all leaves, as `jax.tree.map(lambda x: x[0], state)`; a random key has but one.
        function = mapped.site.fun
        tree_map = self._writer.import_name("jax.tree.map", function)
        lines: list[str] = []
        for name, is_key in self._plan.stacked_parameters(mapped).items():
            device_part = f"{name}[0]" if is_key else f"{tree_map}(lambda x: x[0], {name})"
            lines.append(f"{name} = {device_part}  # of this device")
        body = function.body
        is_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        self._writer.insert_above(body[1] if is_docstring and body[1:] else body[0], lines)
        are_stacked = self._plan.stacked_results(mapped)
        for value in functions.returned_values(function):
            items = value.elts if mapped.tuple_length and isinstance(value, ast.Tuple) else [value]
            for result in itertools.compress(items, are_stacked):
                text = f"{tree_map}(lambda x: x[None], {self._module.text(result)})"
                self._writer.replace(result, text)


def _keyword(name: str, specs: Sequence[str]) -> Expression:
    """Return `name=spec` if all specs are equal, else `name=(spec, spec, ...)`."""
    return f"{name}={specs[0]}" if len(set(specs)) == 1 else NewCall(f"{name}=", specs)


def _callee(fun: str) -> str:
    """Return a function's text as it stands before `(...)`: a lambda in parentheses."""
    return f"({fun})" if fun.startswith("lambda") else fun


def _base_name(mapped: Pmapped, fun: str) -> str:
    """Return `step` for `self.step` or `partial(step, cfg)`; "step" too for other expressions."""
    name = fun.rpartition(".")[2]
    if name.isidentifier():
        return name
    target: Any = mapped.site.fun
    inner = target.args[0] if isinstance(target, ast.Call) and target.args else None
    return getattr(inner, "id", getattr(inner, "attr", "")) or "step"
