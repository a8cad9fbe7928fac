"""Whether all calls of a mapped function are seen, each of that function alone."""

import ast

from jax_dist.checker.model import pmaps
from jax_dist.checker.model.flow import Flow
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.migrating import escapes, following, tracing
from jax_dist.migrating.escapes import Kept


def unseen(module: Module, flow: Flow, site: Site) -> str:
    """Why not all calls of a mapped function are known; "" where they are."""
    why = _known_elsewhere(module, site)
    if why:
        return why
    waiting = list(pmaps.held_by(module, site))
    seen: set[ast.expr] = set()
    while waiting:
        read = waiting.pop()
        if read in seen:
            continue
        seen.add(read)
        call = module.parent(read)
        if isinstance(call, ast.Call) and call.func is read:
            if tracing.may_be_traced(module, call):
                return f"line {read.lineno} may be run under a transformation"
            mine = flow.mapped_calls.get(call)
            if mine is None or mine.node is not site.node or not _is_alone(module, flow, read):
                return f"line {read.lineno} may call another function in its place"
        elif read is site.node and isinstance(call, ast.Assign | ast.AnnAssign):
            continue  # its reads are among those which hold it
        else:
            use = following.use(module, flow, read)
            if not isinstance(use, Kept):
                return f"the mapped function is handed on in line {read.lineno}"
            waiting += use.reads
    return ""


def _known_elsewhere(module: Module, site: Site) -> str:
    """Whether other files, or other objects of this one, may call it."""
    if site.form != "call":
        names = [site.fun.name] if module.function(site.fun) is None else []
        owner = module.parent(site.fun)
        if isinstance(owner, ast.ClassDef):
            return "it is a method"
        if site.fun.decorator_list[0] is not site.node:
            return f"line {site.fun.decorator_list[0].lineno} decorates the mapped function"
    else:
        statement = module.parent(site.node)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute):
                why = _attribute_elsewhere(module, target)
            elif isinstance(target, ast.Name):
                found = escapes.from_target(module, target, statement)
                why = "" if isinstance(found, Kept) else found.why
            else:
                why = f"line {target.lineno} keeps the mapped function in {module.text(target)}"
            if why:
                return why
        names = []
    for name in names:
        if escapes.is_used_elsewhere(module, name):
            return f"other files may call {name}"
    return ""


def _attribute_elsewhere(module: Module, target: ast.Attribute) -> str:
    owner = module.class_of(target)
    if not isinstance(target.value, ast.Name) or owner is None:
        return f"line {target.lineno} keeps the mapped function in {module.text(target)}"
    for node in escapes.attributes(module, target.attr):
        same = isinstance(node.value, ast.Name) and node.value.id == target.value.id
        if not same or module.class_of(node) is not owner:
            return f"line {node.lineno} may mean it by {module.text(node)}"
    if escapes.is_used_elsewhere(module, target.attr):
        return f"other files may call .{target.attr}"
    return ""


def _is_alone(module: Module, flow: Flow, read: ast.expr) -> bool:
    """Whether nothing else may be meant by the name that is called."""
    if isinstance(read, ast.Name):
        bindings = module.reaching(read) or []
        values = [each for each in bindings if not _is_none(each.value)]
        if len(values) == 1 and values[0].kind != "parameter":
            return True
    return len(flow.origins(read)) == 1


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
