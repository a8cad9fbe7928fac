"""Loops around pmaps, run inside the mapped region: one region, entered and left once."""

import dataclasses
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist.mapping import meshes
from jax_dist.passes.interpreter import Values
from jax_dist.rewriting import loop_rules
from jax_dist.rewriting.loop_states import WHOLE, Region, State, Step, Walk

RULES = loop_rules  # imported for the rules that it registers


@dataclasses.dataclass(frozen=True, slots=True)
class LoopInside:
    """A loop that runs in the mapped region of its pmaps."""

    eqn: JaxprEqn
    region: Region
    mesh: Mesh  # names the axis as the pmaps do
    step: Step

    def specs_in(self) -> tuple[P, ...]:
        return tuple(self._spec(state) for state in self.step.taken)

    def specs_out(self) -> list[P]:
        return [self._spec(state) for state in self.step.states]

    def _spec(self, state: State) -> P:
        return P() if state is None else P(*[None] * state, self.region.axis)

    def evaluate(self, values: Values) -> Values:
        """On values of the whole program."""
        with meshes.context_of(self.mesh):
            return jax.shard_map(
                lambda *blocks: self.step.emit(list(blocks)),
                mesh=self.mesh,
                in_specs=self.specs_in(),
                out_specs=self.specs_out(),
                check_vma=False,
            )(*values)


def loop_inside(eqn: JaxprEqn, mesh: Mesh, axis: str) -> LoopInside:
    """Decides how a loop runs inside.

    Args:
      eqn: a scan or while.
      mesh: with `axis` as the pmaps in the loop name it.
      axis: the mapped one.

    Raises:
      loop_states.Refused: it cannot, with the reason.
    """
    region = Region(axis, mesh.shape[axis])
    first = Walk(region)
    step = first.step(eqn, (WHOLE,) * len(eqn.invars))
    if first.wanted:
        # What only pmaps take, and cut, need not be whole on every device before.
        states = tuple(_wanted(atom, first.wanted) for atom in eqn.invars)
        step = Walk(region).step(eqn, states)
    return LoopInside(eqn, region, mesh, step)


def _wanted(atom: Any, wanted: dict[Var, int]) -> State:
    return wanted.get(atom, WHOLE) if isinstance(atom, Var) else WHOLE
