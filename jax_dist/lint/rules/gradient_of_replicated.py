"""JXD303: a gradient inside a `shard_map` by a value that is replicated, which JAX sums."""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import functions, pmaps, scopes, traced
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.rules import Findings, Found, Module, Rule
from jax_dist.primitives import functions_of

_GRADIENTS = ("jax.grad", "jax.value_and_grad", "jax.jacrev", "jax.jacobian")
_COLLECTIVES = (*functions_of("sum"), "jax.lax.all_gather", "jax.lax.pcast", "jax.lax.pvary")
_MOST_ALIASES = 6  # the longest chain `a = b; c = a` that is followed
_MESSAGE = "the gradient by '{name}', which is replicated, is summed over the devices: "
_MESSAGE += "use check_vma=False, or pmean in the loss"


@Rule(
    "JXD303",
    what="In a `shard_map` with `check_vma=True` (the default): a gradient by a captured value, or "
    "by a parameter whose spec is `P()`, of a function of sharded data that does not communicate.",
    why="JAX sums it over the devices, without an error: on N devices it is N times the mean "
    "gradient, where pmap and `check_vma=False` give each device its own. A psum or pmean of it "
    "does not help: 8 times too large on 8 devices (jax 0.10.2).",
    instead="f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P('i')), out_specs=P(), "
    "check_vma=False)\n"
    "# or jax.lax.pmean in the loss; or w = jax.lax.pcast(w, 'i', to='varying') before",
    triggers=(b"shard_map",),
    since=(0, 6, 1),
)
def gradient_of_replicated(module: Module) -> Findings:
    gradients = module.uses(*_GRADIENTS)  # each `jax.grad`
    seen: set[ast.AST] = set()
    for site, function in traced.bodies(module, "shard_map") if gradients else ():
        body = _read_body(module, site, function)
        for gradient in gradients:
            name = body.find_summed(gradient) if body and gradient not in seen else None
            if name is not None:
                seen.add(gradient)
                yield Found(gradient, _MESSAGE.format(name=name))


def _read_body(module: Module, site: Site, function: scopes.Function) -> "_Body | None":
    """Return the function of a shard_map; None if JAX sums no gradients in it, or if unknown."""
    if site.unknown or not all(map(module.holds, site.arguments.values())):
        return None  # some arguments are in `**options`, or in another file
    checks = [site.arguments.get(name) for name in ("check_vma", "check_rep")]
    if any(check and module.text(check) != "True" for check in checks):
        return None
    is_replicated = _replicated_parameters(module, site, function)  # {} if unknown
    return None if all(is_replicated.values()) else _Body(module, function, is_replicated)


def _replicated_parameters(
    module: Module, site: Site, function: scopes.Function
) -> dict[ast.AST, bool]:
    """Return by parameter whether it is replicated: its spec is `P()`; {} if one is not known."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    in_specs = traced.resolve_name(module, site.arguments.get("in_specs"))
    specs = in_specs.elts if isinstance(in_specs, ast.Tuple) else [in_specs] * len(parameters)
    if len(specs) != len(parameters):
        return {}
    replicated: dict[ast.AST, bool] = {}
    for parameter, written_spec in zip(parameters, specs, strict=True):
        spec = traced.resolve_name(module, written_spec)
        if not isinstance(spec, ast.Call) or module.qualified_name(spec.func) not in traced.SPECS:
            return {}
        replicated[parameter] = not spec.args and not spec.keywords
    return replicated


@dataclasses.dataclass(frozen=True)
class _Body:
    """The function that a `shard_map` maps."""

    module: Module
    function: scopes.Function
    is_replicated: dict[ast.AST, bool]  # by parameter of the function

    def find_summed(self, gradient: ast.expr) -> str | None:
        """Return "w" if JAX sums the gradient of `jax.grad(loss)(w, x)` over devices, else None.

        JAX does so if w is replicated, another value that the loss uses is sharded, and the loss
        has no collective. `gradient` is the node `jax.grad`.
        """
        if not self.module.is_inside(gradient, self.function):
            return None
        for call, loss, argument in self._gradient_calls(gradient):
            function = functions.innermost(self.module, loss)
            if function is None or self._communicates(function):
                continue  # a loss of another file may communicate
            others = [value for value in call.args if value is not argument]
            others += self._captures(function)
            has_sharded = any(self._is_same_on_devices(value) is False for value in others)
            if has_sharded and self._is_same_on_devices(argument) is True:
                return self.module.text(argument)
        return None

    def _gradient_calls(self, gradient: ast.expr) -> Iterator[tuple[ast.Call, ast.expr, ast.expr]]:
        """Yield `(call, loss, w)` of each `jax.grad(loss)(w, x)`; with `argnums=1`, x for w."""
        grad_call = self.module.call_of(gradient)
        if grad_call is None or not grad_call.args:
            return
        argnums = [word.value for word in grad_call.keywords if word.arg == "argnums"]
        position: Any = getattr(argnums[0], "value", None) if argnums else 0
        if not isinstance(position, int):
            return
        for function in (grad_call, *pmaps.reads_of(self.module, grad_call)):
            call = self.module.call_of(function)
            if call is not None and position < len(call.args):
                yield call, grad_call.args[0], call.args[position]

    def _is_same_on_devices(self, node: ast.expr, depth: int = 0) -> bool | None:
        """Return whether a value is replicated, the same on all devices; None if not known."""
        while isinstance(node, ast.Attribute | ast.Subscript):  # of `batch["x"]`, the `batch`
            node = node.value
        if not isinstance(node, ast.Name) or depth > _MOST_ALIASES:
            return None
        bindings = self.module.reaching(node)
        if bindings is None or len(bindings) != 1:
            return None
        (binding,) = bindings
        if binding.node in self.is_replicated:
            return self.is_replicated[binding.node]
        if not self.module.is_inside(binding.node, self.function):
            return True if binding.kind == "assign" else None  # a captured variable
        # Another name for a value is like the value; all else that the body computes is sharded.
        if isinstance(binding.value, ast.Name | ast.Attribute):
            return self._is_same_on_devices(binding.value, depth + 1)
        return False

    def _communicates(self, loss: scopes.Function) -> bool:
        """Return whether a loss, or a function of the file that it calls, has a collective."""
        functions_run = traced.reach(self.module, loss)
        uses = self.module.uses(*_COLLECTIVES)
        return any(node in functions_run for use in uses for node in self.module.ancestors(use))

    def _captures(self, loss: scopes.Function) -> Iterator[ast.expr]:
        """Yield a read of each variable of the body that a loss captures."""
        for scope in traced.scopes_in(self.module, loss):
            for name, loads in scope.loads.items():
                scope_and_bindings = scope.lookup(name)
                if scope_and_bindings is not None and scope_and_bindings[0].node is self.function:
                    yield loads[0]
