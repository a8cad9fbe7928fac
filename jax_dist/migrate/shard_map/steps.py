"""The text of mapped functions: `jax.jit(jax.shard_map(...))`, or `jax.jit` with shardings."""

import ast
from collections.abc import Sequence
from typing import Any

from jax_dist.lint.model import functions
from jax_dist.migrate.shard_map.layouts import Layout
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.plan import Plan
from jax_dist.migrate.shard_map.text import Call, Expression


class Steps:
    """Writes the mapped functions of a file.

    A mapped function in `Plan.reductions` becomes `jax.jit` with shardings; each other one becomes
    `jax.jit(jax.shard_map(...))`, whose body squeezes the device axis of its slices.
    """

    def __init__(self, plan: Plan):
        self._plan, self._module, self._writer = plan, plan.module, plan.writer

    def write(self, mapped: Mapped) -> None:
        """Replace the call or decorator of pmap by the new text; comments in it move above."""
        site = mapped.site
        kept = [*site.arguments.values()]
        if site.form == "call":
            kept.append(site.fun)
            call = self._jit_call(mapped, self._module.text(site.fun))
            self._writer.replace(site.node, self._writer.render(call, site.node))
        elif mapped.static and mapped not in self._plan.reductions:
            self._write_below(mapped)
        else:
            self._write_decorator(mapped)
        self._writer.above(site.node, [*self._writer.comments(site.node, kept)])

    # --- of a call

    def _jit_call(self, mapped: Mapped, fun: str) -> Expression:
        """Return `jax.jit(jax.shard_map(...), donate_argnums=...)`, or `jax.jit` with shardings."""
        at, options = mapped.site.node, self._jit_options(mapped)
        if mapped in self._plan.reductions:
            fun, options = self._pass_by_position(mapped, fun), [*self._shardings(mapped), *options]
            return Call(self._writer.name("jax.jit", at), [fun, *options])
        body: Expression = self._shard_map(mapped, self._body_function(mapped, fun))
        if mapped.static:  # shard_map takes arrays only: a new function binds the other arguments
            name = self._writer.free_name(f"{_base_name(mapped, fun)}_over_devices")
            lines = [("mapped = ", body), ("return ", Call("mapped", mapped.dynamic))]
            self._writer.define(at, name, mapped.parameters, lines)
            body = name
        return Call(self._writer.name("jax.jit", at), [body, *options])

    def _jit_options(self, mapped: Mapped) -> list[Expression]:
        """Return the arguments `static_argnums=...` and `donate_argnums=...` that jit needs."""
        static, donated = mapped.static, mapped.texts.get("donate_argnums")
        options: list[Expression] = [f"static_argnums={static}"] if static else []
        return options if donated is None else [*options, f"donate_argnums={donated}"]

    def _shardings(self, mapped: Mapped) -> list[Expression]:
        """Return `in_shardings=..., out_shardings=...`."""
        plan, at = self._plan, mapped.site.node
        replicated, arguments = plan.replicated(at, mapped), plan.layouts.arguments
        ins = [
            replicated if arguments[mapped, p] is Layout.WHOLE else plan.sharded(at, mapped)
            for p in range(len(mapped.axes))
            if p not in mapped.static
        ]
        return [_keyword("in_shardings", ins), f"out_shardings={replicated}"]

    def _shard_map(self, mapped: Mapped, body: Expression) -> Call:
        """Return `jax.shard_map(body, mesh=..., ...)`, without the function if `body` is ""."""
        plan, at = self._plan, mapped.site.node
        axis, arguments, results = plan.axis(mapped), plan.layouts.arguments, plan.layouts.results
        ins = [
            self._writer.spec(at, None if arguments[mapped, p] is Layout.WHOLE else axis)
            for p in range(len(mapped.axes))
            if p not in mapped.static
        ]
        outs = [
            self._writer.spec(at, None if results[mapped, i] is Layout.WHOLE else axis)
            for i in range(mapped.results or 1)
        ]
        options: list[Expression] = [
            f"mesh={plan.mesh(at, mapped)}",
            _keyword("in_specs", ins),
            _keyword("out_specs", outs),
            "check_vma=False",
        ]
        return Call(self._writer.name("jax.shard_map", at), [*filter(None, [body]), *options])

    def _body_function(self, mapped: Mapped, fun: str) -> Expression:
        """Return the text of the function to map: `fun`, or a new one around it.

        In shard_map the slice of a device has a leading dimension of size 1, which pmap removes:
        the new function takes `x[0]` of such arguments, and returns `x[None]` of such results.
        """
        names, at = mapped.parameters, mapped.site.node
        slices, results = self._plan.slices(mapped), self._plan.sliced_results(mapped)
        if not (slices or any(results)):
            if mapped.static:
                return Call(f"lambda {', '.join(mapped.dynamic)}: {_callee(fun)}", names)
            return self._pass_by_position(mapped, fun)
        tree_map = self._writer.name("jax.tree.map", at)

        def leaves(change: str, trees: Sequence[str]) -> tuple[str, Expression]:
            """Return `a, b = ` and `jax.tree.map(lambda x: x[0], (a, b))`."""
            packed = trees[0] if len(trees) == 1 else Call("", trees)
            return f"{', '.join(trees)} = ", Call(tree_map, [f"lambda x: {change}", packed])

        lines: list[tuple[str, Expression]] = [
            (f"{name} = ", f"{name}[0]") for name, is_key in slices.items() if is_key
        ]
        if trees := [name for name, is_key in slices.items() if not is_key]:
            lines.append(leaves("x[0]", trees))
        call = self._call_of(mapped, fun)
        if all(results):
            lines.append(("return ", Call(tree_map, ["lambda x: x[None]", call])))
        elif any(results):
            outs = self._result_names(mapped)
            sliced = [out for out, is_slice in zip(outs, results, strict=True) if is_slice]
            lines += [(f"{', '.join(outs)} = ", call), leaves("x[None]", sliced)]
            lines.append(("return ", ", ".join(outs)))
        else:
            lines.append(("return ", call))
        name = self._writer.free_name(f"{_base_name(mapped, fun)}_on_device")
        self._writer.define(at, name, names, lines)
        if mapped.static:
            return Call(f"lambda {', '.join(mapped.dynamic)}: {name}", names)
        return name

    def _pass_by_position(self, mapped: Mapped, fun: str) -> str:
        """Return `fun`, or a lambda around it that takes keyword-only arguments by position."""
        if not mapped.named:
            return fun
        return f"lambda {', '.join(mapped.parameters)}: {self._call_of(mapped, fun).flat()}"

    def _call_of(self, mapped: Mapped, fun: str) -> Call:
        """Return the code that calls `fun`: of `partial(step, cfg)` it is `step(cfg, state)`."""
        arguments = [
            f"{name}={name}" if name in mapped.named else name for name in mapped.parameters
        ]
        if self._changes_meaning(mapped):
            name = self._writer.free_name(f"{_base_name(mapped, fun)}_per_device")
            self._writer.above(mapped.site.node, [f"{name} = {fun}", ""])
            return Call(name, arguments)
        match mapped.site.fun:
            case ast.Call(args=[inner, *bound], keywords=[*words]) if all(w.arg for w in words):
                if self._module.qualified_name(mapped.site.fun.func) == "functools.partial":
                    bound, more = map(self._module.text, bound), map(self._module.text, words)
                    return Call(_callee(self._module.text(inner)), [*bound, *arguments, *more])
        return Call(_callee(fun), arguments)

    def _changes_meaning(self, mapped: Mapped) -> bool:
        """Return whether the text of the mapped function means something else inside a wrapper.

        As in `step = pmap(step)`, where a wrapper that calls `step` would call itself; and as
        `partial(step, key)` in a wrapper with a parameter `key`.
        """
        module, fun = self._module, mapped.site.fun
        statement = module.statement(mapped.site.node)
        bound = {*mapped.parameters}
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            names = (n for n in ast.walk(statement) if isinstance(n, ast.Name | ast.Attribute))
            bound |= {module.text(name) for name in names if isinstance(name.ctx, ast.Store)}
        for node in ast.walk(fun) if not isinstance(fun, ast.Lambda | ast.FunctionDef) else ():
            if isinstance(node, ast.Name | ast.Attribute) and module.text(node) in bound:
                home = module.scope(node).lookup(node.id) if isinstance(node, ast.Name) else None
                if home is None or not module.is_inside(home[0].node, fun):  # not bound in fun
                    return True
        return False

    def _result_names(self, mapped: Mapped) -> list[str]:
        """Return names for the results: those of the targets of a call, or else out0, out1, ..."""
        for call in mapped.calls:
            targets = [target for target, _ in self._plan.values.targets(call)]
            texts = [getattr(target, "id", "") for target in targets]
            if len(targets) == mapped.results and all(texts) and len({*texts}) == len(texts):
                return texts
        return [f"out{i}" for i in range(mapped.results or 1)]

    # --- of a decorator

    def _write_decorator(self, mapped: Mapped) -> None:
        """Replace the decorator of a function, and remove the device axis inside its body."""
        at, function, options = mapped.site.node, mapped.site.fun, self._jit_options(mapped)
        partial = self._writer.name("functools.partial", at)
        jit: Expression = self._writer.name("jax.jit", at)
        if mapped in self._plan.reductions:
            decorator = Call(partial, [jit, *self._shardings(mapped), *options])
            self._writer.replace(at, self._writer.render(decorator, at))
            return
        if options:
            jit = Call(partial, [jit, *options])
        shard_map = self._shard_map(mapped, "")
        mapping = Call(partial, [shard_map.name, *shard_map.arguments])
        indent = self._writer.indent(function)
        text = f"{self._writer.render(jit, at)}\n{indent}@{self._writer.render(mapping, at)}"
        self._writer.replace(at, text)
        self._write_body(mapped, function)

    def _write_below(self, mapped: Mapped) -> None:
        """Turn the decorator of a step with static arguments into a call below the function.

        `@partial(pmap, static_broadcasted_argnums=0)` on `def step` becomes `def _step`, with
        `step = jax.jit(_step_over_devices, static_argnums=(0,))` below it.
        """
        writer, function = self._writer, mapped.site.fun
        name = writer.free_name(f"_{function.name}")
        writer.undecorate(function, name)
        call = self._jit_call(mapped, name)
        indent = writer.indent(function)
        text = writer.assignment(function.name, call, len(indent), indent)
        blank = "\n\n" if indent else "\n\n\n"
        writer.insert(self._module.span(function)[1], f"{blank}{indent}{text}")

    def _write_body(self, mapped: Mapped, function: Any) -> None:
        """Remove the device axis of a function's parameters, and restore it in its results."""
        tree_map = self._writer.name("jax.tree.map", function)
        lines = [
            f"{name} = {f'{name}[0]' if is_key else f'{tree_map}(lambda x: x[0], {name})'}"
            for name, is_key in self._plan.slices(mapped).items()
        ]
        body = function.body
        is_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        first = body[1] if is_docstring and body[1:] else body[0]
        self._writer.above(first, [f"{line}  # of this device" for line in lines])
        results = self._plan.sliced_results(mapped)
        returned = [n for n in functions.own_nodes(function) if isinstance(n, ast.Return)]
        for statement in returned:
            parts: Sequence[Any] = [statement.value]
            if mapped.results is not None and isinstance(statement.value, ast.Tuple):
                parts = statement.value.elts
            for is_slice, part in zip(results, parts, strict=False):
                if is_slice and part is not None:
                    text = self._module.text(part)
                    self._writer.replace(part, f"{tree_map}(lambda x: x[None], {text})")


def _keyword(name: str, specs: Sequence[str]) -> Expression:
    """Return `name=spec` if all specs are equal, else `name=(spec, spec, ...)`."""
    return f"{name}={specs[0]}" if len(set(specs)) == 1 else Call(f"{name}=", specs)


def _callee(fun: str) -> str:
    """Return a function's text as it stands before `(...)`: a lambda in parentheses."""
    return f"({fun})" if fun.startswith("lambda") else fun


def _base_name(mapped: Mapped, fun: str) -> str:
    """Return the name of a function, or of the one inside of a partial or vmap; else "step"."""
    name = fun.rpartition(".")[2]
    if name.isidentifier():
        return name
    target = mapped.site.fun
    inner = target.args[0] if isinstance(target, ast.Call) and target.args else None
    return getattr(inner, "id", getattr(inner, "attr", "")) or "step"
