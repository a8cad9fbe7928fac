"""What a function reads beside its arguments, and some text of the project may set meanwhile.

jax.pmap knows a function that it has mapped, and runs the program that it has traced: with the
learning rate of that time. Where another function takes its place, it is traced again.
"""

import ast
import os
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.scopes import last_name
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.migrate import imports
from jax_dist.migrate.results import ProjectContext

_Defined: TypeAlias = tuple[Module, Any]  # the file, and the def or class
# What gives another value each time, or what some other program sets.
_CHANGING = re.compile(
    r"os\.(environ|getenv)|numpy\.random|(random|time|datetime|uuid|secrets|builtins\.open)\b"
)
# Methods of lists, dictionaries, sets and arrays that change these.
_IN_PLACE = (
    rb"append|appendleft|extend|insert|pop|popleft|popitem|remove|clear|sort|reverse|add|discard"
    rb"|update|setdefault|fill|put|itemset|resize|partition|__setattr__|__setitem__"
)
_SETATTR = rb"(?<!def __)(?<!super\(\)\.__)setattr(?:__)?"
_STEPS = rb"\s*(?:[-+*/|&@%^]|//|\*\*|<<|>>)?=[^=]"


def first(module: Module, context: ProjectContext, fun: ast.expr | None) -> str:
    """The first such read of a function and of those that it calls, as its text; "" if none.

    Of a method that only another file shows, the expression itself: whose it is, is not known.
    """
    waiting: list[_Defined] = [(module, fun)]
    seen: set[ast.AST] = set()
    while waiting:
        home, called = waiting.pop()
        definitions = _definitions(home, context, called)
        if not definitions and isinstance(called, ast.Attribute):
            method = re.compile(rb"def %b\(self\b" % called.attr.encode())
            path = os.path.abspath(home.source.path)
            is_of_object = context.is_in_another(method, path)
            if is_of_object and not _is_of_library(home, called):
                return home.text(called)
        for where, definition in definitions:
            if definition in seen:
                continue
            seen.add(definition)
            for node in functions.all_nodes(definition):
                if not isinstance(node, ast.Name | ast.Attribute):
                    continue
                if _CHANGING.match(where.qualified_name(node) or _builtin(where, node)):
                    return where.text(node)
                if not _is_state(where, node):
                    continue
                waiting.append((where, node))
                if where.call_of(node) is None and _is_set(where, context, node):
                    return where.text(node)
    return ""


def _definitions(module: Module, context: ProjectContext, called: Any) -> list[_Defined]:
    """The functions that an expression may be; of a method, all of that name in the file."""
    found = _named(module, context, called)
    made = module.value(called) if isinstance(called, ast.Name) else None
    if isinstance(made, ast.Call):  # an object that is called
        found = [
            (where, each)
            for where, node in _named(module, context, made.func)
            for each in getattr(node, "body", ())
            if getattr(each, "name", "") == "__call__"
        ]
    if not found and isinstance(called, ast.Attribute):
        methods = (e for e in module.nodes(ast.FunctionDef) if e.name == called.attr)
        found = [(module, e) for e in methods if isinstance(module.parent(e), ast.ClassDef)]
    return [(where, each) for where, each in found if isinstance(each, scopes.Function)]


def _named(module: Module, context: ProjectContext, node: ast.expr) -> list[_Defined]:
    """The functions and classes that an expression names, here or in another file."""
    if (own := pmaps.definition(module, node)) is not None:
        return [(module, own)]
    home = imports.definer(module, context.project, node)
    other = None if home is None else context.module(home)
    if other is not None:
        bound = other.scopes.module.bindings.get(last_name(node), ())
        return [(other, each.node) for each in bound]
    bound = module.reaching(node) if isinstance(node, ast.Name) else ()
    return [(module, each.node) for each in bound or () if each.kind == "class"]


def _builtin(module: Module, node: ast.expr) -> str:
    return f"builtins.{module.builtin(node)}"


def _is_state(module: Module, node: ast.Name | ast.Attribute) -> bool:
    """Whether an expression reads a variable around a function, or a field of an object there."""
    if not isinstance(node.ctx, ast.Load) or _is_of_library(module, node):
        return False
    root = _root(node)
    if not isinstance(root, ast.Name):
        return False
    if root.id == "self":
        return root is not node
    found, around = module.scope(root).lookup(root.id), module.scope(root).around_comprehensions
    return found is not None and (found[0] is not around or around is module.scopes.module)


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _is_of_library(module: Module, node: ast.expr) -> bool:
    return (module.qualified_name(node) or "").split(".")[0] in KNOWN


def _is_set(module: Module, context: ProjectContext, node: ast.Name | ast.Attribute) -> bool:
    """Whether some text sets what is read, or an entry of it, other than where it is made."""
    name, known = last_name(node), module.memo(_is_set)
    root = _root(node)
    assert isinstance(root, ast.Name)
    found = module.scope(root).lookup(root.id)
    if found is not None and found[0] is not module.scopes.module and root.id != "self":
        of = name, root.id, found[0], module.function(node)
        if of not in known:
            known[of] = _is_set_below(module, node, found)
        return known[of]
    key = name, root is node
    if key not in known:
        bindings = found[1] if root is node and found is not None else []
        known[key] = _is_name_set(module, context, name, bindings)
    return known[key]


def _is_set_below(
    module: Module, node: ast.expr, found: tuple[scopes.NameScope, list[scopes.Binding]]
) -> bool:
    """Whether a variable of the function around is set, or changed, below the one that reads it.

    What stands above is done first in each call, which makes another function to map.
    """
    (home, bindings), end = found, getattr(module.function(node), "end_lineno", 0)
    if any(each.kind == "outer" or getattr(each.node, "lineno", 0) > end for each in bindings):
        return True
    for each in ast.walk(home.node):
        if isinstance(each, ast.Attribute | ast.Subscript) and each.lineno > end:
            is_changed = not isinstance(each.ctx, ast.Load)
            if isinstance(each, ast.Attribute) and module.call_of(each) is not None:
                is_changed = re.fullmatch(_IN_PLACE, each.attr.encode()) is not None
            if is_changed and last_name(node) in (last_name(each), last_name(each.value)):
                return True
    return False


def _is_name_set(
    module: Module, context: ProjectContext, name: str, bindings: Sequence[scopes.Binding]
) -> bool:
    if len(bindings) > 1 and not all(each.kind in ("import", "def") for each in bindings):
        return True
    for each in module.nodes(ast.Attribute, ast.Subscript):
        is_made = getattr(module.function(each), "name", "") == "__init__"
        is_entry = isinstance(each, ast.Subscript)
        is_it = last_name(each.value if is_entry else each) == name
        if is_it and not isinstance(each.ctx, ast.Load) and (is_entry or not is_made):
            return True
    word, path = re.escape(name.encode()), os.path.abspath(module.source.path)
    of_it = rb"\b%b(?:\[[^]\n]*\])*\.(?:(?:%b)\(|__dict__\b)" % (word, _IN_PLACE)
    by_name = rb"%b\([^,\n]*,\s*(?:[^\"'\s]|[\"']%b[\"'])" % (_SETATTR, word)
    by_name += rb"|\bvars\([^()\n]*\)(?:\[|\.update\()|" + of_it
    elsewhere = rb"\.%b%b|\b%b\[[^]\n]*\]%b" % (word, _STEPS, word, _STEPS)
    return bool(re.search(by_name, module.source.code)) or context.is_in_another(
        re.compile(by_name + b"|" + elsewhere), path
    )
