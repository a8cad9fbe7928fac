"""Along which axes of the mesh is a value of a jaxpr the same on all devices."""

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jax_dist import _compat, uniformity
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.bodies import carries
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist.primitives import Primitive
from jax_dist.uniformity import NOWHERE as NOWHERE
from jax_dist.uniformity import AxisName as AxisName
from jax_dist.uniformity import Facts as Facts
from jax_dist.uniformity import Same as Same
from jax_dist.uniformity import cut_along as cut_along


class Invariance(uniformity.Uniformity):
    """The facts of jaxprs."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden: dict[int, tuple[JaxprEqn, Any]] = {}

    def record(self, eqn: JaxprEqn) -> Primitive:
        return record_of(eqn)

    def opened(self, body: Any) -> Jaxpr:
        return interpreter.open_jaxpr(body)

    def bodies(self, eqn: JaxprEqn) -> list[Any]:
        return interpreter.bodies(eqn)

    def hidden_body(self, eqn: JaxprEqn) -> Any:
        if id(eqn) not in self._hidden:
            self._hidden[id(eqn)] = eqn, _compat.expanded(eqn)
        return self._hidden[id(eqn)][1]

    def is_literal(self, atom: Any) -> bool:
        return isinstance(atom, Literal)

    def carries(self, eqn: JaxprEqn) -> list[tuple[int, int]]:
        return carries(eqn)

    def inside(self, eqn: JaxprEqn, scope: Same) -> Same:
        return scope | frozenset(eqn.params["newly_manual_axes"])

    def cut(self, eqn: JaxprEqn) -> list[Same]:
        return [cut_along(spec) for spec in eqn.params["in_specs"]]
