"""JXD207: a PartitionSpec compared with a tuple."""

import ast

from jax_dist.lint.model import traced
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety


@Rule(
    "JXD207",
    "spec-tuple-compare",
    what="`==` and `!=` between a `PartitionSpec` and a tuple.",
    why="Since jax 0.10.0 `P('i') == ('i',)` is silently False, and the program takes the other "
    "branch. The fix is unsafe: equal specs may be written in two ways, `P('i')` and `P('i', "
    "None)`.",
    instead="replicated = x.sharding.spec == jax.sharding.PartitionSpec()",
    fix="unsafe",
    triggers=(b"*spec ==", b"*spec !=", b"== spec", b"!= spec", b") == P(")
    + (b") == PartitionSpec(",),
)
def spec_tuple_compare(module: Module) -> Findings:
    for node in module.nodes(ast.Compare):
        match node:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[right]):
                for spec, other in ((left, right), (right, left)):
                    if isinstance(other, ast.Tuple) and _is_spec(module, spec):
                        message = "a PartitionSpec is never equal to a tuple since jax 0.10.0"
                        yield Found(node, message, _fix(module, other))


def _is_spec(module: Module, node: ast.expr) -> bool:
    """Return whether this is `P(...)`, `x.sharding.spec`, or a name of such a value."""
    match traced.followed(module, node):
        case ast.Call(func=function):
            return module.qualified_name(function) in traced.SPECS
        case ast.Attribute(value=ast.Attribute(attr="sharding"), attr="spec"):
            return True
    return False


def _fix(module: Module, other: ast.Tuple) -> Fix | None:
    name, imports = module.name_for("jax.sharding.PartitionSpec", other)
    text = module.text(other)
    if not text.startswith("("):
        return None
    edit = Edit(*module.span(other), f"{name}({text[1:-1].strip().removesuffix(',')})")
    return Fix("compare with a PartitionSpec", Safety.UNSAFE, (edit,), imports)
