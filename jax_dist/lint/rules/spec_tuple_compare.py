"""JXD207: a PartitionSpec compared with a tuple."""

import ast
import re
from collections.abc import Iterator

from jax_dist.lint.model import traced
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, rule

_LISTED = re.compile(rb"(?<!\w)(?<!for )\w*specs? in [\[(]")  # not `for spec in [`


@rule(
    "JXD207",
    "spec-tuple-compare",
    what="`==`, `!=` and `in` between a `PartitionSpec` and tuples.",
    why="A PartitionSpec is not equal to a tuple since jax 0.10.0: `P('i') == ('i',)` is "
    "silently False, and the program takes the other branch. The fix is unsafe: equal "
    "specs may be written in two ways, `P('i')` and `P('i', None)`.",
    instead="replicated = x.sharding.spec == jax.sharding.PartitionSpec()",
    fix="unsafe",
    triggers=(b"*spec == (", b"*spec != (", b") == spec", b") != spec", b"*spec in [")
    + (b"*spec in (", b"*spec not in (", b"*spec not in [")
    + (b".spec ==", b".spec !=", b".spec in", b".spec not in")
    + (b") == P(", b") == PartitionSpec(", b"*specs == (", b"*specs in ("),
    narrow=dict.fromkeys((b"*spec in [", b"*spec in (", b"*specs in ("), _LISTED),
)
def spec_tuple_compare(module: Module) -> Iterator[Found]:
    for node in module.nodes(ast.Compare):
        if len(node.ops) != 1:
            continue
        left, right = node.left, node.comparators[0]
        tuples = _tuples(module, node.ops[0], left, right)
        if tuples:
            message = "a PartitionSpec is never equal to a tuple since jax 0.10.0"
            yield Found(node, message, _fix(module, tuples))


def _tuples(module: Module, op: ast.cmpop, left: ast.expr, right: ast.expr) -> list[ast.Tuple]:
    """Return the tuples that are compared with a spec."""
    if isinstance(op, ast.Eq | ast.NotEq):
        for one, other in ((left, right), (right, left)):
            if isinstance(other, ast.Tuple) and _is_spec(module, one):
                return [other]
        return []
    if not isinstance(op, ast.In | ast.NotIn) or not _is_spec(module, left):
        return []
    elements = right.elts if isinstance(right, ast.Tuple | ast.List | ast.Set) else ()
    return [each for each in elements if isinstance(each, ast.Tuple)]


def _is_spec(module: Module, node: ast.expr) -> bool:
    return all(
        module.qualified_name(each.func) in traced.SPECS
        if isinstance(each, ast.Call)
        else isinstance(each, ast.Attribute)
        and each.attr == "spec"
        and _is_sharding(module, each.value)
        for each in _followed(module, node)
    )


def _is_sharding(module: Module, node: ast.expr) -> bool:
    """Return `x.sharding`, `NamedSharding(...)`, or a name of such a value."""
    return all(
        module.qualified_name(each.func) == "jax.sharding.NamedSharding"
        if isinstance(each, ast.Call)
        else isinstance(each, ast.Attribute) and each.attr == "sharding"
        for each in _followed(module, node)
    )


def _followed(module: Module, node: ast.expr) -> list[ast.expr]:
    """Return the values of a name, or the expression itself."""
    return (module.values(node) if isinstance(node, ast.Name) else None) or [node]


def _fix(module: Module, tuples: list[ast.Tuple]) -> Fix | None:
    edits: list[Edit] = []
    imports: tuple[str, ...] = ()
    for each in tuples:
        name, imports = module.name_for("jax.sharding.PartitionSpec", each)
        start, end = module.span(each)
        text = module.text(each)
        if not text.startswith("("):
            return None
        inside = text[1:-1].strip()
        edits.append(Edit(start, end, f"{name}({inside.removesuffix(',')})"))
    return Fix("compare with a PartitionSpec", Safety.UNSAFE, tuple(edits), imports)
