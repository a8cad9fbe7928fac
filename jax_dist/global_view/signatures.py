"""What a view knows of its calls: the types of its state, which leaves vary, a program for each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_dist._pmap import axes, meshes
from jax_dist._pmap.body import Call, type_of
from jax_dist._rewrite.pipeline import warn_user
from jax_dist._usage import human_bytes
from jax_dist.errors import ArgumentError, MappedAxisError
from jax_dist.global_view import state_placement, traced_steps
from jax_dist.global_view.programs import Ready, Setting, StepProgram
from jax_dist.global_view.report import Leaf
from jax_dist.global_view.state_placement import GivenState, StateType


class Signatures:
    """The programs of one view, by the types of their arguments."""

    def __init__(self, fun: Callable, setting: Setting):
        self._fun, self._setting = fun, setting
        self._ready: dict[Any, Ready] = {}
        self._programs: dict[Any, StepProgram] = {}
        # Of a state, the leaves that vary in one of the programs: then they do in all of them.
        self._varying: dict[tuple[int, StateType], set[int]] = {}
        self._warned: set[str] = set()  # paths
        self.known: dict[int, StateType] = {}  # of each state argument
        self.last: StepProgram | None = None

    def ready_for(self, call: Call) -> Ready:
        types = [type_of(leaf) for leaf in call.leaves]
        key = (call.structure, call.static, *map(_key_of, types))
        ready = self._ready.get(key)
        if ready is None:
            ready = self._settled(call, types)
            if ready.program.cacheable:
                self._ready[key] = ready
        self.last = ready.program
        return ready

    def learn(self, number: int, state: Any, *, stacked: Any) -> GivenState:
        """Take a state argument; of a stacked one, leaves of unequal keys vary from now on."""
        name, by_device = axes.argument_name(self._fun, number), self._setting.by_device
        given = GivenState.of(state, name, by_device, stacked, self.known.get(number))
        own, varying = given.own(), self._varying.setdefault((number, given.type), set())
        if not own <= varying:
            varying |= own
            self._ready.clear()
        return given

    def placed(self, number: int, given: GivenState, program: StepProgram | None) -> Any:
        """One argument of the state on the mesh."""
        if program is None:
            setting, paths = self._setting, given.short_paths
            layouts = state_placement.layouts_of(
                setting.shardings, setting.by_device, paths, given.type.leaves
            )
            lie = [(each, None) for each in layouts]
        else:
            own = [leaf for leaf in program.leaves.values() if leaf.argument == number]
            lie = [(leaf.sharding, not leaf.shared) for leaf in own]
        values = [given.put(n, sharding, varies=varies) for n, (sharding, varies) in enumerate(lie)]
        if program is None:
            own = self._varying[number, given.type]
            kinds = zip(values, given.type.leaves, strict=True)
            apart = {n for n, (value, kind) in enumerate(kinds) if value.ndim > len(kind.shape)}
            lines = ((given.paths[n], human_bytes(values[n].nbytes)) for n in sorted(apart - own))
            self._warn(
                {path: f"{path}, {size}" for path, size in lines},
                "Copies of leaves of the state differ, and each device has its own so far: {}. "
                "Give place the other arguments of a call: then it is known which vary.",
            )
        return jax.tree.unflatten(given.type.structure, values)

    def tree_of_state(self, of_leaf: Callable[[Leaf], Any], what: str) -> Any:
        leaves, trees = self.program_for(what).leaves.values(), []
        for number in self._setting.state:
            own = [leaf for leaf in leaves if leaf.argument == number]
            trees.append(jax.tree.unflatten(self.known[number].structure, map(of_leaf, own)))
        return trees[0] if len(trees) == 1 else tuple(trees)

    def program_for(self, what: str) -> StepProgram:
        """The last one, of which something is asked."""
        if self.last is None:
            raise ArgumentError(
                f"'{what}' of a global view is not known yet. Call it first, or "
                "place(state, *other arguments)."
            )
        return self.last

    # ---- a call whose types were not seen before

    def _settled(self, call: Call, types: list[Any]) -> Ready:
        state, size = self._types_of_state(call, types), self._setting.size
        leaf_axes = list(call.axes)
        for place, kind in state.items():
            types[place] = jax.ShapeDtypeStruct((size, *kind.shape), kind.dtype)
            leaf_axes[place] = 0
        for place, (kind, axis) in enumerate(zip(types, leaf_axes, strict=True)):
            rank = len(kind.shape)
            if axis is not None and (not -rank <= axis < rank or kind.shape[axis] != size):
                path = call.paths()[place]
                raise MappedAxisError(
                    f"'{self._setting.fun_name}' is mapped over {size} devices, but {path} has "
                    f"shape {tuple(kind.shape)}, which is to be {size} along dimension {axis}. "
                    "Give [N, b, ...] for N devices, as place_batch makes it of rows."
                )
        program = self._program(
            dataclasses.replace(call, leaves=types, axes=tuple(leaf_axes)), state
        )
        lifted = []
        for place, leaf in program.leaves.items():
            shape = jnp.shape(call.leaves[place])
            if shape == leaf.type.shape and not leaf.shared:
                if shape[:1] == (size,) and not self.known[leaf.argument].is_said:
                    raise ArgumentError(
                        f"{leaf.path} of shape {shape} begins to vary at {leaf.origin}: it may "
                        f"have one value for each of {size} devices, or one for all. Say which, by "
                        "view.place(state, *other arguments, stacked=...)."
                    )
                lifted.append(place)
            elif shape != leaf.type.shape and leaf.shared:
                raise ArgumentError(
                    f"{leaf.path} has shape {tuple(shape)}, and the step keeps one value of it, of "
                    f"shape {leaf.type.shape}. Place a state of pmap once, by "
                    "state = view.place(state, stacked=True)."
                )
        return Ready(program, tuple(lifted))

    def _program(self, call: Call, state: dict[int, jax.ShapeDtypeStruct]) -> StepProgram:
        places = {
            number: [place for place in state if call.owners[place] == number]
            for number in self._setting.state
        }
        sets = {n: self._varying.setdefault((n, self.known[n]), set()) for n in places}
        varying = frozenset(places[n][index] for n, found in sets.items() for index in found)
        key = (call.structure, call.static, varying, *map(_key_of, call.leaves))
        if key in self._programs:
            return self._programs[key]
        with meshes.outside_of_meshes():
            program = traced_steps.build(self._setting, call, state, varying)
        if program.cacheable:
            self._programs[key] = program
        for number, own in places.items():
            found = {n for n, place in enumerate(own) if not program.leaves[place].shared}
            if not found <= sets[number]:
                sets[number] |= found
                self._ready.clear()  # of programs that took them for shared
        apart = [leaf for leaf in program.leaves.values() if leaf.is_kept_from_cut]
        self._warn(
            {
                leaf.path: f"{leaf.path}, {human_bytes(leaf.bytes_per_device)} per device, begins "
                f"to vary at {leaf.origin}"
                for leaf in apart
            },
            "Leaves of the state are not sharded, for each device has others: {}. Average them, or "
            "their gradients, over devices (jax.lax.pmean) before that line; or let shardings= be "
            "a function that gives PartitionSpec() for them.",
        )
        return program

    def _warn(self, lines: dict[str, str], text: str) -> None:
        """Warn once of each path."""
        new = [line for path, line in lines.items() if path not in self._warned]
        self._warned.update(lines)
        if new:
            warn_user(text.format("; ".join(new)), UserWarning)

    def _types_of_state(self, call: Call, types: Sequence[Any]) -> dict[int, jax.ShapeDtypeStruct]:
        """The type of each leaf of the state on one device, `[*s]`, by its place."""
        args, _ = call.rebuild(call.leaves)
        found: dict[int, jax.ShapeDtypeStruct] = {}
        for number in self._setting.state:
            places = [place for place, owner in enumerate(call.owners) if owner == number]
            known = self.known.get(number)
            structure = jax.tree.structure(args[number])
            shapes = [types[place].shape for place in places]
            if known is None or not known.fits(structure, shapes, {self._setting.size}):
                kinds = tuple(jax.ShapeDtypeStruct(types[n].shape, types[n].dtype) for n in places)
                known = self.known[number] = StateType(structure, kinds)
            found.update(zip(places, known.leaves, strict=True))
        return found


def _key_of(kind: Any) -> tuple:
    return kind.shape, kind.dtype, kind.weak_type
