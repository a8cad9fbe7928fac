"""JXD207: a PartitionSpec compared with a tuple."""

import ast

from jax_dist.lint.model import traced
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety


@Rule(
    "JXD207",
    "spec-tuple-compare",
    what="`==`, `!=` and `in` between a `PartitionSpec` and tuples.",
    why="Since jax 0.10.0 `P('i') == ('i',)` is silently False, and the program takes the other "
    "branch. The fix is unsafe: equal specs may be written in two ways, `P('i')` and `P('i', "
    "None)`.",
    instead="replicated = x.sharding.spec == jax.sharding.PartitionSpec()",
    fix="unsafe",
    triggers=(b"*spec ==", b"*spec !=", b"*spec in", b"*spec not in", b"== spec", b"!= spec")
    + (b") == P(", b") == PartitionSpec("),
)
def spec_tuple_compare(module: Module) -> Findings:
    for node in module.nodes(ast.Compare):
        if len(node.ops) != 1:
            continue
        left, right = node.left, node.comparators[0]
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            elements = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else ()
            sides = [(left, element) for element in elements]
        else:
            sides = [(left, right), (right, left)]
        tuples = [
            other
            for spec, other in sides
            if isinstance(other, ast.Tuple) and _is_spec(module, spec)
        ]
        if tuples:
            message = "a PartitionSpec is never equal to a tuple since jax 0.10.0"
            yield Found(node, message, _fix(module, tuples))


def _is_spec(module: Module, node: ast.expr) -> bool:
    """Return whether this is `P(...)`, `x.sharding.spec`, or a name of such a value."""
    node = traced.followed(module, node) or node
    if isinstance(node, ast.Call):
        return module.qualified_name(node.func) in traced.SPECS
    if not isinstance(node, ast.Attribute) or node.attr != "spec":
        return False
    sharding = traced.followed(module, node.value)
    if isinstance(sharding, ast.Call):
        return module.qualified_name(sharding.func) == "jax.sharding.NamedSharding"
    return isinstance(sharding, ast.Attribute) and sharding.attr == "sharding"


def _fix(module: Module, tuples: list[ast.Tuple]) -> Fix | None:
    name, imports = module.name_for("jax.sharding.PartitionSpec", tuples[0])
    edits: list[Edit] = []
    for each in tuples:
        text = module.text(each)
        if not text.startswith("("):
            return None
        inside = text[1:-1].strip().removesuffix(",")
        edits.append(Edit(*module.span(each), f"{name}({inside})"))
    return Fix("compare with a PartitionSpec", Safety.UNSAFE, tuple(edits), imports)
