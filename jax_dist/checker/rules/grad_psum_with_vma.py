"""JXD303: a gradient by an argument that all devices share, then `psum` or `pmean` of it."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import functions, pmaps, scopes, traced
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import TREE_MAPS
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD303",
    name="grad-psum-with-vma",
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
_SUMS = ("jax.lax.psum", "jax.lax.pmean")


@rule(PAGE, triggers=(b"*shard_map*",), since=(0, 6, 1), also=(b"*grad*",))
def check(module: Module) -> Iterator[Found]:
    for site in traced.applications(module, "shard_map"):
        function = functions.innermost(module, site.fun)
        if function is None or not site.is_known or not _checks_vma(module, site.keywords):
            continue
        shared = _shared(module, function, site.keywords.get("in_specs"))
        if shared:
            yield from _in_body(module, function, shared)


def _checks_vma(module: Module, keywords: dict[str, ast.expr]) -> bool:
    """Whether it is on; where that is a variable, nothing is said."""
    given = [keywords[name] for name in ("check_vma", "check_rep") if name in keywords]
    return all(module.text(value) == "True" for value in given)


def _shared(module: Module, function: scopes.Function, specs: ast.expr | None) -> set[str]:
    """The parameters whose spec is `P()`: the same on all devices."""
    positional = [*function.args.posonlyargs, *function.args.args]
    specs = _followed(module, specs)
    if isinstance(specs, ast.Tuple):
        each_spec: list[ast.expr | None] = list(specs.elts)
    else:
        each_spec = [specs] * len(positional)
    pairs = zip(positional, each_spec, strict=False)
    return {parameter.arg for parameter, spec in pairs if _is_empty(module, spec)}


def _followed(module: Module, node: ast.expr | None) -> ast.expr | None:
    if isinstance(node, ast.Name):
        values = module.values(node)
        return values[0] if values and len(values) == 1 else None
    return node


def _is_empty(module: Module, spec: ast.expr | None) -> bool:
    spec = _followed(module, spec)
    if not isinstance(spec, ast.Call) or spec.args or spec.keywords:
        return False
    name = module.qualified_name(spec.func)
    return name in ("jax.P", "jax.sharding.PartitionSpec", "jax.experimental.pjit.PartitionSpec")


def _in_body(module: Module, function: scopes.Function, shared: set[str]) -> Iterator[Found]:
    for call in module.calls(*_GRADIENTS):
        taken = module.parent(call)
        if not (isinstance(taken, ast.Call) and taken.func is call):
            continue
        if module.function(taken) is not function or not _by_shared(module, call, taken, shared):
            continue
        if _has_collective(module, call):
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
    if not (isinstance(argument, ast.Name) and argument.id in shared):
        return False
    reaching = module.reaching(argument) or []
    return all(binding.kind == "parameter" for binding in reaching)


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
        if not isinstance(call, ast.Call):
            continue
        name = module.qualified_name(call.func)
        sums = name in _SUMS and call.args[:1] == [value]
        maps = name in TREE_MAPS and call.args[1:] == [value]
        if sums or (maps and _maps_sum(module, call.args[0])):
            yield call


def _maps_sum(module: Module, function: ast.expr) -> bool:
    body = function.body if isinstance(function, ast.Lambda) else None
    return isinstance(body, ast.Call) and module.qualified_name(body.func) in _SUMS


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
