"""Diagnostic of `explain`: gradients that JAX sums over devices.

Under `check_vma=True` (the default of `jax.shard_map`), the gradient by a value that is replicated
is summed over devices: JAX transposes its broadcast (`pvary`) to a psum. The loss of one device
then has a gradient that is N times too large, and a pmean afterwards changes nothing.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from jax_dist import _codes, _compat
from jax_dist._passes import PassFinding, interpreter
from jax_dist._passes.interpreter import record_of

_REMATERIALIZED = "rematted_computation"  # JAX's name for the forward part of a checkpoint
_WHY_SUMMED = (
    "under check_vma=True, JAX sums it over all devices, so for the loss of one device it is N "
    "times too large, also after a pmean; give shard_map check_vma=False, take lax.pmean of the "
    "loss before the gradient, or see that it is divided by lax.axis_size"
)


def find_gradient_sums(jaxpr: Any) -> tuple[PassFinding, ...]:
    """Return a finding for each gradient that JAX sums over devices.

    A shard_map that reduces its loss itself has none: the gradient of a psum has to be summed.
    """
    findings = []
    for region in interpreter.equations(jaxpr):
        if record_of(region).kind != "region" or not region.params["check_vma"]:
            continue
        line = interpreter.source_line(region)
        transposed = list(_transposed_equations(region.params["jaxpr"], line))
        if any(_is_transposed_psum(eqn) for eqn, _ in transposed):
            continue
        for eqn, line in transposed:
            if record_of(eqn).over == "sum":
                over = ", ".join(repr(str(axis)) for axis in eqn.params["axes"])
                what = f"the gradient by a replicated value is summed over {over}"
                code = _codes.GRADIENT_OF_REPLICATED
                findings.append(PassFinding(code, "noted", what, _WHY_SUMMED, line))
    return tuple(dict.fromkeys(findings))


def _transposed_equations(
    body: Any, around: str, *, is_inside: bool = False
) -> Iterator[tuple[JaxprEqn, str]]:
    """Yield the equations of the backward pass, each with the user's line.

    JAX marks them in their name stack, which starts anew in each body: so the equations in a body
    of one (`is_inside`) are too, but for those that a checkpoint computes forward once more.
    """
    for eqn in interpreter.open_jaxpr(body).eqns:
        line = interpreter.source_line(eqn) or around
        names = str(eqn.source_info.name_stack)
        is_transposed = "transpose(" in names or (is_inside and _REMATERIALIZED not in names)
        if is_transposed:
            yield eqn, line
        for inner in interpreter.bodies(eqn):
            yield from _transposed_equations(inner, line, is_inside=is_transposed)


def _is_transposed_psum(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a transposed psum: pvary of a variable or of the seed 1.0."""
    if _compat.name_of(eqn) != "pvary":
        return False
    atom: Any = eqn.invars[0]
    return isinstance(atom, Var) or (np.ndim(atom.val) == 0 and float(atom.val) == 1.0)
