"""The arguments of a call, brought to where the program of a step wants them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from jax_dist.global_views import refusals, state_placement
from jax_dist.global_views.programs import StepProgram
from jax_dist.mapping import placement
from jax_dist.mapping.body import Call, type_of


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """What to do with calls of the same types."""

    program: StepProgram
    lifted: tuple[int, ...]  # leaves of the state that vary, and come as if they were shared
    merged: tuple[int, ...]  # those that are shared, and come as if they varied
    by_device: NamedSharding  # of `[N, *s]`

    def given(self, call: Call) -> list[Any]:
        """The leaves where the program wants them."""
        placed = list(call.leaves)
        for place in self.lifted:
            leaf = self.program.leaves[place]
            placed[place] = state_placement.for_each_device(placed[place], leaf.size, leaf.sharding)
        for place in self.merged:
            leaf = self.program.leaves[place]
            if isinstance(placed[place], Tracer):
                raise refusals.stacked_in_trace(leaf.path)
            slices = state_placement.put_slices(placed[place], self.by_device)
            placed[place] = state_placement.one_of_equals(slices, leaf.sharding, leaf.path)
        for place, target in enumerate(self.program.in_shardings):
            leaf = placed[place]
            if isinstance(leaf, Tracer):
                continue
            if not (target.is_fully_addressable or target.is_fully_replicated):
                self._check_is_of_all(call, place)
            if not isinstance(leaf, jax.Array):
                continue
            if leaf.sharding == target or not leaf.committed:
                continue
            if place in self.program.leaves:
                self._check_place(place, leaf, target)
            placed[place] = placement.put_as_jit_would(leaf, target)
        return placed

    def _check_is_of_all(self, call: Call, place: int) -> None:
        """Raises PlacementError for what is to be cut over processes, and is of this one alone."""
        leaf = call.leaves[place]
        if place in (*self.lifted, *self.merged) or (
            isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        ):
            return
        path, kind = call.paths()[place], f"{type(leaf).__module__}.{type(leaf).__name__}"
        if isinstance(leaf, jax.Array):
            kind = "jax.Array on devices of this process"
        raise refusals.host_array(path, jnp.shape(leaf), kind, jax.process_count())

    def _check_place(self, place: int, leaf: jax.Array, target: NamedSharding) -> None:
        if not leaf.sharding.is_equivalent_to(target, leaf.ndim):
            path = self.program.leaves[place].path
            raise refusals.lies_elsewhere(path, leaf.sharding, target.spec)

    def types(self, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The types of the leaves as the program takes them."""
        own = self.program.leaves
        return [own[n].whole if n in own else type_of(leaf) for n, leaf in enumerate(leaves)]
