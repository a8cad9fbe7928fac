"""JXD303, JXD304, JXD305: what works under pmap, and is wrong or slow under `shard_map`."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import pmaps, scopes, traced
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import TREE_MAPS
from jax_dist.lint.model.traced import Application
from jax_dist.lint.rules import Found, Page, rule
from jax_dist.primitives import functions_of

_GRADIENT = Page(
    code="JXD303",
    name="grad-psum-with-vma",
    summary="`psum` or `pmean` of a gradient under `check_vma=True`",
    cost="gradients N times too large on N devices",
    what="Finds, in a `shard_map` with `check_vma=True` (the default), a gradient with respect to "
    "a parameter whose spec is `P()`, followed by a `psum` or `pmean` of it.",
    why="The gradient is already summed over the devices. A psum multiplies it by their number, "
    "and a pmean leaves the sum: both are 8 times what the same code gives under pmap or with "
    "`check_vma=False` (8 simulated devices, jax 0.10.2), without an error.",
    example="def step(w, x):\n    return jax.lax.pmean(jax.grad(loss)(w, x), 'i')\n\n\n"
    "f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P('i')), out_specs=P())\n",
    instead="f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P('i')), out_specs=P(), "
    "check_vma=False)\n",
    fix="None: the two programs look alike, and only you know which one you meant. You can also "
    "mark the parameter as different on each device first: `w = jax.lax.pcast(w, 'i', "
    "to='varying')`.",
    since="jax 0.6.1: `jax.shard_map` with `check_vma`.",
    source="Measured on jax 0.10.2.",
)

_GRADIENTS = ("jax.grad", "jax.value_and_grad")
_SUMS = functions_of("sum")


@rule(_GRADIENT, triggers=(b"*shard_map*",), since=(0, 6, 1))
def _grad_psum_with_vma(module: Module) -> Iterator[Found]:
    for site, function in traced.bodies(module, "shard_map"):
        words = site.words
        given = [words[name] for name in ("check_vma", "check_rep") if name in words]
        # Where that is a variable, nothing is said.
        if site.is_known and all(module.text(value) == "True" for value in given):
            specs = traced.axes_of(module, function, words.get("in_specs"))
            shared = {each.arg for each, spec in specs if traced.is_empty_spec(module, spec)}
            if shared:
                yield from _summed_again(module, function, shared)


def _summed_again(module: Module, function: scopes.Function, shared: set[str]) -> Iterator[Found]:
    for call in module.calls(*_GRADIENTS):
        taken = module.call_of(call)
        if taken is None or module.function(taken) is not function:
            continue
        if not _by_shared(module, call, taken, shared) or _has_collective(module, call):
            continue  # a loss that is summed itself has another gradient
        for total in _summed(module, call, taken):
            message = "this gradient is already summed over the devices; it is summed once more"
            yield Found(total, message)


def _by_shared(module: Module, gradient: ast.Call, taken: ast.Call, shared: set[str]) -> bool:
    """Whether the gradient is by one parameter that all devices share, as it came in."""
    position = 0
    for keyword in gradient.keywords:
        if keyword.arg == "argnums":
            is_number = isinstance(keyword.value, ast.Constant)
            position = keyword.value.value if is_number else -1  # type: ignore[attr-defined]
    if not isinstance(position, int) or not 0 <= position < len(taken.args):
        return False
    argument = taken.args[position]
    if not isinstance(argument, ast.Name) or argument.id not in shared:
        return False
    return _is_parameter(module, argument)


def _has_collective(module: Module, gradient: ast.Call) -> bool:
    """Whether the differentiated function may communicate: it does, or it cannot be read."""
    function = pmaps.definition(module, gradient.args[0]) if gradient.args else None
    if function is None:
        return True
    uses = module.uses(*_SUMS, "jax.lax.all_gather", "jax.lax.pcast", "jax.lax.pvary")
    return any(traced.is_inside(module, use, function) for use in uses)


def _summed(module: Module, gradient: ast.Call, taken: ast.Call) -> Iterator[ast.Call]:
    """The psums and pmeans of the gradient: around it, or of the name it is given."""
    with_value = module.qualified_name(gradient.func) == "jax.value_and_grad"
    for value in _reads(module, taken, 1 if with_value else None):
        call: Any = module.parent(value)
        match call:
            case ast.Call(args=[first, *_]) if first is value:
                if module.qualified_name(call.func) in _SUMS:
                    yield call
            case ast.Call(args=[ast.Lambda(body=ast.Call(func=inner)), tree]) if tree is value:
                maps = module.qualified_name(call.func) in TREE_MAPS
                if maps and module.qualified_name(inner) in _SUMS:
                    yield call


def _reads(module: Module, taken: ast.Call, place: int | None) -> list[ast.expr]:
    around: Any = module.parent(taken)
    target = around.targets[0] if isinstance(around, ast.Assign) else None
    if place is None and target is None:
        return [taken]
    if place is not None and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        target = target.elts[place]
    elif place is not None:
        return []
    if not isinstance(target, ast.Name):
        return []
    found: list[ast.expr] = []
    for read in module.reads(module.scope(target), target.id):
        nodes = [binding.node for binding in module.reaching(read) or []]
        if nodes in ([around], [target]):
            found.append(read)
    return found


_WHOLE_BLOCK = Page(
    code="JXD304",
    name="rank-sensitive-body",
    summary="a `shard_map` body that depends on the rank of its block",
    cost="it counts or sums one dimension more than under pmap",
    what="Finds, in functions passed to `shard_map`, reductions without an axis, `reshape`, `dot`, "
    "`len` and `shape[0]` of an unmodified parameter.",
    why="pmap removes the mapped dimension before the function sees its argument; `shard_map` "
    "keeps it, with the size of the block. A body that moves from pmap to `shard_map` "
    "unchanged then counts or sums over one more dimension, without an error: `x.shape[0]` is "
    "2 under pmap and 1 under `shard_map` (f32[8,2] on 8 simulated devices, jax 0.10.2).",
    example="step = jax.shard_map(lambda x: x - jnp.mean(x), mesh=mesh, in_specs=P('i'), "
    "out_specs=P('i'))\n",
    instead="step = jax.shard_map(lambda x: x - jnp.mean(x, axis=1, keepdims=True), mesh=mesh, "
    "in_specs=P('i'), out_specs=P('i'))\n",
    fix="None: the text does not show whether the whole block was meant.",
    since="Any jax with shard_map.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured on jax 0.10.2.",
    default=False,
)

_REDUCTIONS = ("sum", "mean", "max", "min", "prod", "std", "var")
_WHOLE = (*_REDUCTIONS, "reshape", "ravel", "flatten", "dot")


@rule(_WHOLE_BLOCK, triggers=(b"*shard_map*",))
def _rank_sensitive_body(module: Module) -> Iterator[Found]:
    for function in dict.fromkeys(body for _, body in traced.bodies(module, "shard_map")):
        scope = module.scopes.of[function]
        for parameter in scopes.parameters(function.args):
            for read in module.reads(scope, parameter.arg):
                found = _whole(module, read) if _is_parameter(module, read) else None
                if found is not None:
                    message = f"{found} of a whole block may count the mapped dimension too"
                    yield Found(read, message)


def _is_parameter(module: Module, read: ast.Name) -> bool:
    """Whether nothing else was given this name since."""
    reaching = module.reaching(read) or []
    return all(binding.kind == "parameter" for binding in reaching)


def _whole(module: Module, read: ast.Name) -> str | None:
    """What is asked of a whole block: "sum", "shape[0]"; None for anything else."""
    around: Any = module.parent(read)
    if isinstance(around, ast.Attribute):
        outer = module.parent(around)
        if around.attr == "shape":
            is_first = isinstance(outer, ast.Subscript) and module.text(outer.slice) == "0"
            return "shape[0]" if is_first else None
        if not (isinstance(outer, ast.Call) and outer.func is around and around.attr in _WHOLE):
            return None
        axisless = not outer.args and not outer.keywords
        return around.attr if around.attr not in _REDUCTIONS or axisless else None
    if not (isinstance(around, ast.Call) and around.args[:1] == [read]):
        return None
    if isinstance(around.func, ast.Name) and around.func.id == "len":
        return "len"
    root, _, name = (module.qualified_name(around.func) or "").rpartition(".")
    if root != "jax.numpy" or name not in _WHOLE:
        return None
    axisless = len(around.args) == 1 and not around.keywords
    return name if name not in _REDUCTIONS or axisless else None


_NO_JIT = Page(
    code="JXD305",
    name="shard-map-no-jit",
    summary="a `shard_map` that is called outside `jit`",
    cost="each operation is compiled alone: 132 ms for a call of 0.36 ms",
    what="Finds a `jax.shard_map` whose result is called outside any traced code: at module level, "
    "in `main`, or in a function that is only called from there.",
    why="Outside `jit`, each operation of the body is compiled and dispatched separately. A body "
    "with one psum took 132 ms for each call, and 0.36 ms with jit (jax 0.10.2, 8 simulated "
    "devices).",
    example="import jax\n\nf = jax.shard_map(g, mesh=mesh, in_specs=spec, out_specs=spec)\n"
    "y = f(x)\n",
    instead="import jax\n\n"
    "f = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=spec, out_specs=spec))\ny = f(x)\n",
    fix="Unsafe: jit around it gives the same values up to the order of operations, but traces "
    "the body once, so prints and other effects in it run once.",
    since="Any jax with shard_map.",
    source="https://docs.jax.dev/en/latest/notebooks/shard_map.html",
)

_DEEPEST = 3  # functions between the call and the level of the module


@rule(_NO_JIT, triggers=(b"*shard_map*",))
def _shard_map_no_jit(module: Module) -> Iterator[Found]:
    for application in traced.applications(module, *traced.SHARD_MAP):
        node = _mapped(module, application)
        calls = (call for call in _calls(module, application, node) if _eager(module, call))
        first = next(calls, None)
        if first is not None:
            name = module.text(first.func) if isinstance(first.func, ast.Name) else "its call"
            message = f"shard_map without jit: {name} runs one operation at a time"
            yield Found(application.node, message, _jit_around(module, application, node))


def _mapped(module: Module, application: Application) -> ast.expr | None:
    """The expression that is the mapped function; None for a decorated def."""
    if isinstance(application.fun, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    around = module.parent(application.node)
    if isinstance(around, ast.Call) and around.args[:1] == [application.fun]:
        return around  # partial(shard_map, ...)(f)
    return application.node


def _calls(module: Module, application: Application, node: ast.expr | None) -> Iterator[ast.Call]:
    if node is None:
        function = application.fun
        if any(traced.decorators(module, function)):
            return
        held: list[ast.expr] = [
            read
            for read in module.reads(module.scope(function), function.name)
            # It can be nothing else there: examples define `f` again and again.
            if [binding.node for binding in module.reaching(read) or ()] == [function]
        ]
    else:
        held = [node, *pmaps.reads_of(module, node)]
    yield from filter(None, map(module.call_of, held))


def _eager(module: Module, node: ast.AST, depth: int = 0) -> bool:
    """Whether it is sure that nothing traces the code at this place."""
    function = module.function(node)
    if function is None:
        return True
    if isinstance(function, ast.Lambda) or function.decorator_list or depth == _DEEPEST:
        return False
    if not isinstance(module.parent(function), ast.Module):
        return False
    if function.name == "main":
        return True
    calls = list(map(module.call_of, module.reads(module.scope(function), function.name)))
    return bool(calls) and all(
        call is not None and _eager(module, call, depth + 1) for call in calls
    )


def _jit_around(module: Module, application: Application, node: ast.expr | None) -> Fix | None:
    jit, imports = module.name_for("jax.jit", application.node)
    if node is not None:
        start, end = module.span(node)
        edits = (Edit(start, start, f"{jit}("), Edit(end, end, ")"))
        return Fix("wrap it in jax.jit", Safety.UNSAFE, edits, imports)
    indent, _ = module.margins(application.node)
    if indent.strip() != "@":
        return None
    line = module.offset(application.node.lineno, 0)
    edit = Edit(line, line, f"{indent}{jit}\n")
    return Fix("wrap it in jax.jit", Safety.UNSAFE, (edit,), imports)
