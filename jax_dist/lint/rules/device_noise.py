"""JXD501, JXD502: noise that is the same on all devices, or differs, where it should not."""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import functions, pmaps, scopes, traced
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, rule

_REPEATED = Page(
    code="JXD501",
    name="repeated-noise",
    summary="a draw with a shared key for data that is split",
    cost="the same noise on every device",
    what="Finds, in functions given to `pmap` or `shard_map`, a draw with a key that all devices "
    "share, for an argument that differs between them: a draw of `jax.random` of its shape, and "
    "dropout of Flax, Haiku or Equinox.",
    why="All devices draw the same numbers, each for rows of its own: of 8 rows on 8 devices, one "
    "distinct row of noise (`pmap`, jax 0.10.2). Dropout, sampled data and initial states then "
    "repeat with every device, and nothing fails.",
    example="def noisy(key, x):\n    return x + jax.random.normal(key, x.shape)\n\n\n"
    "f = jax.pmap(noisy, axis_name='i', in_axes=(None, 0))\n",
    instead="def noisy(key, x):\n    key = jax.random.fold_in(key, jax.lax.axis_index('i'))\n"
    "    return x + jax.random.normal(key, x.shape)\n",
    fix="None: equal noise on all devices may be meant; then say so by an ignore comment.",
    since="Any jax.",
    source="Measured on jax 0.10.2. `jax_dist.explain` and `testing.compare_device_counts` see "
    "what the text does not show.",
)

# With the key first; the shape as the second argument, the third, or by keyword.
_FUNCTIONS = tuple(
    f"jax.random.{name}"
    for name in ("bernoulli", "bits", "cauchy", "exponential", "gumbel", "laplace", "normal",
                 "rademacher", "truncated_normal", "uniform")
)  # fmt: skip  # fmt: skip
_OF_KEYS = {  # what they return is shared where all that they are given is
    "jax.random.PRNGKey", "jax.random.key", "jax.random.split", "jax.random.fold_in",
    "flax.nnx.Rngs", "haiku.PRNGSequence",
}  # fmt: skip  # fmt: skip
_DROPOUTS = {  # layers, and the name of the key where one is called
    "equinox.nn.Dropout": "key",
    "flax.linen.Dropout": "rng",
    "flax.nnx.Dropout": "rngs",
}
_OF_TYPES = ("shape", "ndim", "dtype", "size")


@rule(_REPEATED, triggers=traced.TRIGGERS)
def _repeated_noise(module: Module) -> Iterator[Found]:
    seen: set[ast.AST] = set()
    for function, body in _bodies(module):
        for call in functions.all_nodes(function):
            if not isinstance(call, ast.Call) or call in seen:
                continue
            key, data = _draw(module, call)
            if key is not None and body.is_shared(key) and any(map(body.is_mapped, data)):
                seen.add(call)
                yield Found(call, "all devices draw the same numbers, each for data of its own")


# --- what draws, with which key, for what


def _draw(module: Module, call: ast.Call) -> tuple[ast.expr | None, list[ast.expr]]:
    """The key of a draw, and the values of which one must differ between devices."""
    name = module.qualified_name(call.func)
    words = {word.arg: word.value for word in call.keywords if word.arg is not None}
    if name in _FUNCTIONS and call.args:
        shapes = [*call.args[1:], *([words["shape"]] if "shape" in words else [])]
        attributes = [each for each in shapes if isinstance(each, ast.Attribute)]
        return call.args[0], [each.value for each in attributes if each.attr == "shape"]
    if name == "haiku.dropout" and call.args:
        return call.args[0], [*call.args[2:], *([words["x"]] if "x" in words else [])]
    layer = _DROPOUTS.get(_made_by(module, call.func) or "")
    if layer is not None:
        return words.get(layer), call.args
    if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("init"):
        return None, []  # draws the weights
    # Of `rngs={"dropout": key}`, the key; other streams may draw for the weights.
    rngs = words.get("rngs")
    key = (module.value(rngs) if isinstance(rngs, ast.Name) else None) or rngs
    match key:
        case ast.Dict(keys=names, values=keys):
            streams = zip(names, keys, strict=True)
            named = {each.value: key for each, key in streams if isinstance(each, ast.Constant)}
            key = named.get("dropout")
        case ast.Call(func=ast.Name(id="dict"), keywords=streams):
            key = next((word.value for word in streams if word.arg == "dropout"), None)
        case _:
            key = rngs
    return key, [*call.args, *words.values()]


def _made_by(module: Module, layer: ast.expr) -> str | None:
    """`"equinox.nn.Dropout"` for what such a call made, here or in the class."""
    if isinstance(layer, ast.Name):
        made = module.values(layer) or []
    elif isinstance(layer, ast.Attribute):
        made = module.attribute_values(layer)
    else:
        made = [layer]
    names = {module.qualified_name(each.func) for each in made if isinstance(each, ast.Call)}
    return names.pop() if len(names) == 1 and len(made) == 1 else None


# --- a mapped function


def _bodies(module: Module) -> Iterator[tuple[scopes.Function, "_Body"]]:
    """Each mapped function, with the parameters that devices share and that differ."""
    for site in pmaps.sites(module):
        function = functions.innermost(module, site.fun) if site.is_application else None
        if function is not None and not site.unknown:
            axes = traced.axes_of(module, function, site.arguments.get("in_axes"))
            yield function, _Body(module, {each: _is_none(axis) for each, axis in axes})
    for each, function in traced.bodies(module, "shard_map"):
        if each.is_known and "in_specs" in each.words:
            specs = traced.axes_of(module, function, each.words["in_specs"])
            is_empty = {each: traced.is_empty_spec(module, spec) for each, spec in specs}
            yield function, _Body(module, is_empty)


def _is_none(axis: ast.expr | None) -> bool | None:
    """Of `in_axes`: whether all devices share it; None: the text does not say."""
    if axis is None:
        return False  # the default, 0
    return axis.value is None if isinstance(axis, ast.Constant) else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """What is known of the values in a mapped function, and in functions inside it."""

    module: Module
    parameters: dict[ast.arg, bool | None]  # whether devices share it; None: not known

    def is_shared(self, value: ast.expr, depth: int = 8) -> bool:
        """Whether all devices have this number, key or sequence of keys."""
        inner = depth - 1
        match value:
            case ast.Constant():
                return True
            case ast.Name():
                return depth > 0 and self._is_shared_name(value, inner)
            case ast.Subscript(value=keys, slice=index):
                return self.is_shared(keys, inner) and self.is_shared(index, inner)
            case ast.Call(func=ast.Name(id="next"), args=[keys]):
                return self.is_shared(keys, inner)
            case ast.Call(func=ast.Attribute(value=rngs), args=[]) if self._is_rngs(rngs):
                return self.is_shared(rngs, inner)  # `rngs.dropout()`
            case ast.Call(func=made, args=args, keywords=words):
                given = [*args, *(word.value for word in words)]
                name = self.module.qualified_name(made)
                return name in _OF_KEYS and all(self.is_shared(each, inner) for each in given)
        return False

    def is_mapped(self, value: ast.expr) -> bool:
        """Whether it is a parameter that differs between devices, as it came, or a part of one."""
        while isinstance(value, ast.Subscript | ast.Attribute):
            if isinstance(value, ast.Attribute) and value.attr in _OF_TYPES:
                return False
            value = value.value
        return isinstance(value, ast.Name) and self._is_parameter(value, shared=False)

    def _is_shared_name(self, name: ast.Name, depth: int) -> bool:
        if self._is_parameter(name, shared=True):
            return True
        bindings = self.module.reaching(name) or []
        if len(bindings) != 1:
            return False
        value = bindings[0].value
        if value is None:  # `key, other = split(key)`
            statement = self.module.statement(bindings[0].node)
            value = statement.value if isinstance(statement, ast.Assign) else None
        return value is not None and self.is_shared(value, depth)

    def _is_parameter(self, name: ast.Name, *, shared: bool) -> bool:
        reaching: list[Any] = self.module.reaching(name) or []
        told = [self.parameters.get(each.node) for each in reaching]
        return bool(told) and all(each is shared for each in told)

    def _is_rngs(self, value: ast.expr) -> bool:
        return _made_by(self.module, value) == "flax.nnx.Rngs"


_DRIFTING = Page(
    code="JXD502",
    name="drifting-copies",
    summary="a key for each device in a result that is declared equal",
    cost="copies of the state drift apart",
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


@rule(_DRIFTING, triggers=(b"*shard_map*",), since=(0, 6, 1))
def _drifting_copies(module: Module) -> Iterator[Found]:
    for site, function in traced.bodies(module, "shard_map"):
        if not site.is_known or not _promises(module, site.words):
            continue
        nodes = functions.all_nodes(function)
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
    is_unchecked = unchecked and all(module.text(value) == "False" for value in unchecked)
    return bool(is_unchecked and traced.is_empty_spec(module, keywords.get("out_specs")))


def _is_known(module: Module, call: ast.Call) -> bool:
    """Whether it is a call of JAX that reduces over no axis."""
    name = module.qualified_name(call.func) or ""
    if name == "jax.lax.axis_index":
        return True
    return name.startswith(("jax.random.", "jax.numpy.", "jax.nn."))
