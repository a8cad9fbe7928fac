"""Whether a function traces the same collectives in each run, by its text.

A run shows that a result is the same on all devices, by the program that was traced. Where the text
chooses by a setting, as in `if SYNC: g = pmean(g, "i")` or by the axis that a module is given,
another run may trace another program, in which it is not. What is not known may choose.
"""

import ast

from jax_dist import primitives
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.scopes import last_name
from jax_dist.lint.model.semantic_model import Module

_CHOOSING = (
    ast.If,
    ast.IfExp,
    ast.Match,
    ast.While,
    ast.For,
    ast.Try,
    ast.BoolOp,
    ast.comprehension,
)
_KNOWN = frozenset(("jax", "numpy", "optax", "math", "chex", "functools"))
_BUILTINS = frozenset(
    ("abs", "dict", "enumerate", "float", "int", "len", "list", "max", "min", "print", "range")
    + ("reversed", "sorted", "sum", "tuple", "zip")
)
# Of arrays, trees and records.
_METHODS = frozenset(
    ("all", "any", "argmax", "argmin", "astype", "copy", "cumsum", "dot", "flatten", "max", "mean")
    + ("min", "prod", "ravel", "repeat", "reshape", "squeeze", "std", "sum", "swapaxes", "take")
    + ("transpose", "var", "add", "set", "multiply", "get", "items", "keys", "values", "replace")
    + ("_replace", "_asdict")
)
# Which arguments of these are functions; of others of jax, none is.
_FUNCTIONS = dict.fromkeys(
    ("grad", "value_and_grad", "vmap", "jit", "checkpoint", "remat", "jvp", "vjp", "linearize")
    + ("jacfwd", "jacrev", "hessian", "scan", "map", "associative_scan", "partial", "eval_shape")
    + ("custom_jvp", "custom_vjp", "closure_convert", "filter", "reduce"),
    (0,),
) | {"cond": (1, 2), "switch": (1,), "while_loop": (0, 1), "fori_loop": (2,)}


def may_differ(module: Module, function: ast.expr | None) -> bool:
    """Whether a mapped function may trace other collectives in another run."""
    return not _Text(module).is_known(function)


class _Text:
    """What is asked of one function, and of those of the file that it calls."""

    def __init__(self, module: Module):
        self._module = module
        self._asked: set[ast.AST] = set()

    def is_known(self, function: ast.expr | None) -> bool:
        """Whether an expression is a function that does not choose."""
        if isinstance(function, ast.Tuple | ast.List):
            return all(map(self.is_known, function.elts))
        if isinstance(function, ast.Call):  # `jax.grad(f)`
            name = self._module.qualified_name(function.func) or ""
            return name.rpartition(".")[2] in _FUNCTIONS and self._is_fixed_call(function)
        definition = pmaps.definition(self._module, function)
        if definition is None:
            value = self._module.value(function) if function is not None else None
            if isinstance(value, ast.Call):  # `g = jax.grad(f)`
                return self.is_known(value)
            return self._is_of_a_library(function)
        if definition not in self._asked:
            self._asked.add(definition)
            marks = getattr(definition, "decorator_list", [])
            return all(map(self.is_known, marks)) and all(
                self._is_fixed(each) for each in ast.walk(definition) if each not in marks
            )
        return True

    def _is_of_a_library(self, function: ast.expr | None) -> bool:
        name = self._module.qualified_name(function) if function is not None else None
        return (name or "").split(".")[0] in _KNOWN

    def _is_fixed(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return self._is_fixed_call(node)
        return not isinstance(node, _CHOOSING)

    def _is_fixed_call(self, call: ast.Call) -> bool:
        function = call.func
        last = last_name(function)
        if self._is_of_a_library(function):
            taken = _FUNCTIONS.get(last, ())
            return all(n < len(call.args) and self.is_known(call.args[n]) for n in taken) and (
                last not in primitives.LAX_COLLECTIVES or self._has_fixed_axis(call)
            )
        if self._module.builtin(function) is not None:
            return last in _BUILTINS
        is_method = isinstance(function, ast.Attribute) and last in _METHODS
        return is_method or self._is_record(function) or self.is_known(function)

    def _is_record(self, function: ast.expr) -> bool:
        """Whether a class of the file has no code of its own."""
        found = self._module.reaching(function) if isinstance(function, ast.Name) else None
        nodes = [each.node for each in found or ()]
        return len(nodes) == 1 and all(
            isinstance(node, ast.ClassDef)
            and not any(isinstance(each, ast.FunctionDef) for each in node.body)
            for node in nodes
        )

    def _has_fixed_axis(self, call: ast.Call) -> bool:
        named = [*call.args[1:], *(word.value for word in call.keywords)]
        return all(map(self._is_constant, named))

    def _is_constant(self, given: ast.expr) -> bool:
        if isinstance(given, ast.Tuple | ast.List):
            return all(map(self._is_constant, given.elts))
        value = self._module.value(given) if isinstance(given, ast.Name) else given
        return isinstance(value, ast.Constant)
