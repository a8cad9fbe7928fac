"""JXD501: every device draws the same noise, and adds it to data of its own."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import pmaps, scopes, structure, traced
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD501",
    name="repeated-noise",
    what="Finds, in functions given to `pmap` or `shard_map`, a draw of `jax.random` with a key "
    "that all devices share, of the shape of an argument that differs between them.",
    why="All devices draw the same numbers, each for rows of its own: of 8 rows on 8 devices, one "
    "distinct row of noise (`pmap`, jax 0.10.2). Dropout, sampled data and initial states then "
    "repeat with every device, and nothing fails.",
    example="def noisy(key, x):\n    return x + jax.random.normal(key, x.shape)\n\n\n"
    "f = jax.pmap(noisy, axis_name='i', in_axes=(None, 0))\n",
    instead="def noisy(key, x):\n    key = jax.random.fold_in(key, jax.lax.axis_index('i'))\n"
    "    return x + jax.random.normal(key, x.shape)\n",
    fix="None: equal noise on all devices may be meant; then say so by an ignore comment.",
    since="Any jax.",
    source="Measured on jax 0.10.2. `jax_dist.explain` and `jax_dist.check` see what the text does "
    "not show.",
)

# With the key first; the shape as the second argument, the third, or by keyword.
_DRAWS = tuple(
    f"jax.random.{name}"
    for name in ("bernoulli", "bits", "cauchy", "exponential", "gumbel", "laplace", "normal",
                 "rademacher", "truncated_normal", "uniform")
)  # fmt: skip
_KEYS = ("jax.random.PRNGKey", "jax.random.key")


@rule(PAGE, triggers=traced.TRIGGERS, also=(b"*random*",))
def check(module: Module) -> Iterator[Found]:
    seen: set[ast.AST] = set()
    for function, shared, mapped in _bodies(module):
        for call in module.calls(*_DRAWS):
            if call in seen or module.function(call) is not function or not call.args:
                continue
            if _is_shared(module, call.args[0], shared) and _has_shape_of(module, call, mapped):
                seen.add(call)
                yield Found(call, "all devices draw the same numbers, each for data of its own")


def _bodies(module: Module) -> Iterator[tuple[scopes.Function, set[str], set[str]]]:
    """Each mapped function, with the parameters that devices share and that differ."""
    for site in pmaps.sites(module):
        function = structure.mapped_function(module, site) if site.is_application else None
        if function is not None and not site.unknown:
            axes = site.arguments.get("in_axes")
            yield function, *_split(module, function, axes, _is_none)
    for each in traced.applications(module, "shard_map"):
        function = structure.innermost(module, each.fun)
        if function is not None and each.is_known and "in_specs" in each.keywords:
            yield function, *_split(module, function, each.keywords["in_specs"], _is_empty)


def _split(module: Module, function: scopes.Function, given, is_whole) -> tuple[set[str], set[str]]:
    positional = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(given, ast.Tuple):
        if len(given.elts) != len(positional):
            return set(), set()  # bound by a partial, or starred
        told = [is_whole(module, each) for each in given.elts]
    else:
        told = [is_whole(module, given)] * len(positional)
    named = list(zip(positional, told, strict=True))
    shared = {name for name, whole in named if whole is True}
    return shared, {name for name, whole in named if whole is False}


def _is_none(module: Module, axis: ast.expr | None) -> bool | None:
    """Of `in_axes`: whether all devices share it; None: the text does not say."""
    del module
    if axis is None:
        return False  # the default, 0
    if isinstance(axis, ast.Constant):
        return axis.value is None
    return None


def _is_empty(module: Module, spec: ast.expr | None) -> bool | None:
    if not isinstance(spec, ast.Call) or not (module.qualified_name(spec.func) or "").endswith(
        (".P", ".PartitionSpec")
    ):
        return None
    return not spec.args and not spec.keywords


def _is_shared(module: Module, key: ast.expr, shared: set[str]) -> bool:
    """Whether a key comes as it is from a shared parameter, or is made of a number."""
    if isinstance(key, ast.Call):
        is_made = module.qualified_name(key.func) in _KEYS
        return is_made and len(key.args) == 1 and isinstance(key.args[0], ast.Constant)
    if not isinstance(key, ast.Name):
        return False
    reaching = module.reaching(key) or []
    if reaching and all(each.kind == "parameter" for each in reaching):
        return key.id in shared
    values = module.values(key)
    is_one = values is not None and len(values) == 1 and isinstance(values[0], ast.Call)
    return bool(is_one and values and _is_shared(module, values[0], shared))


def _has_shape_of(module: Module, call: ast.Call, mapped: set[str]) -> bool:
    """Whether `x.shape` is asked for, of a parameter as it came."""
    shapes = [*call.args[1:], *(each.value for each in call.keywords if each.arg == "shape")]
    for shape in shapes:
        match shape:
            case ast.Attribute(value=ast.Name(id=name) as read, attr="shape") if name in mapped:
                reaching = module.reaching(read) or []
                if reaching and all(each.kind == "parameter" for each in reaching):
                    return True
    return False
