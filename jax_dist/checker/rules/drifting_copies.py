"""JXD502: noise of each device's own in a result that is said to be the same everywhere."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import functions, traced
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD502",
    name="drifting-copies",
    what="Finds, in a `shard_map` with `check_vma=False` and `out_specs=P()`, a function without "
    "any collective that folds `axis_index` into a key.",
    why="`out_specs=P()` says that all devices have the same result, and with `check_vma=False` "
    "nobody looks. With keys of their own they have not: one device's result is taken for all, and "
    "copies of a state drift apart.",
    example="def step(key, w):\n    key = jax.random.fold_in(key, jax.lax.axis_index('i'))\n"
    "    return w + jax.random.normal(key, w.shape)\n\n\n"
    "f = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)\n",
    instead="def step(key, w):\n    return w + jax.random.normal(key, w.shape)\n",
    fix="None: a shared key and a mean over the devices are both possible.",
    since="jax 0.6.1: `jax.shard_map` with `check_vma`.",
    source="https://docs.jax.dev/en/latest/notebooks/shard_map.html",
)


@rule(PAGE, triggers=(b"*shard_map*",), since=(0, 6, 1), also=(b"*fold_in*", b"*axis_index*"))
def check(module: Module) -> Iterator[Found]:
    for site in traced.applications(module, "shard_map"):
        function = functions.innermost(module, site.fun)
        if function is None or not site.is_known or not _promises(module, site.keywords):
            continue
        nodes = list(functions.all_nodes(function))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        if not all(_is_known(module, call) for call in calls):
            continue  # another function may reduce
        for call in calls:
            if module.qualified_name(call.func) == "jax.random.fold_in" and any(
                module.qualified_name(inner.func) == "jax.lax.axis_index"
                for argument in call.args[1:]
                for inner in ast.walk(argument)
                if isinstance(inner, ast.Call)
            ):
                yield Found(call, "keys of their own make results differ that out_specs=P() shares")


def _promises(module: Module, keywords: dict[str, ast.expr]) -> bool:
    unchecked = [keywords[name] for name in ("check_vma", "check_rep") if name in keywords]
    spec = keywords.get("out_specs")
    return (
        bool(unchecked)
        and all(module.text(value) == "False" for value in unchecked)
        and isinstance(spec, ast.Call)
        and not spec.args
        and (module.qualified_name(spec.func) or "").endswith((".P", ".PartitionSpec"))
    )


def _is_known(module: Module, call: ast.Call) -> bool:
    """Whether it is a call of JAX that reduces over no axis."""
    name = module.qualified_name(call.func) or ""
    if name == "jax.lax.axis_index":
        return True
    return name.startswith(("jax.random.", "jax.numpy.", "jax.nn."))
