"""The programs of a view by signature, and which leaves of its state vary."""

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
from jax_dist.global_view import traced_steps
from jax_dist.global_view.placement import GivenState, StateType, shardings_of
from jax_dist.global_view.programs import Setting, StepProgram
from jax_dist.global_view.report import Leaf


class Signatures:
    """The programs of one view, by the types of their arguments."""

    def __init__(self, fun: Callable, setting: Setting):
        self._fun, self._setting = fun, setting
        self._ready: dict[Any, StepProgram] = {}  # by the types of calls
        self._programs: dict[Any, StepProgram] = {}  # by the types of the state on one device, too
        # Of a state, the leaves that vary in one of the programs: then they do in all of them.
        self._varying: dict[tuple[int, StateType], set[int]] = {}
        self._warned: set[str] = set()  # paths
        self.known: dict[int, StateType] = {}  # of each state argument
        self.last: StepProgram | None = None

    def program_for(self, call: Call) -> StepProgram:
        types = [type_of(leaf) for leaf in call.leaves]
        key = (call.structure, call.static, *map(_key_of, types))
        program = self._ready.get(key)
        if program is None:
            program = self._find(call, types)
            if program.is_cacheable:
                self._ready[key] = program
        self.last = program
        return program

    def known_program(self, what: str) -> StepProgram:
        """Return the last program, for its report."""
        if self.last is None:
            raise ArgumentError(
                f"'{what}' of a global view is not known yet. Call it first, or "
                "place(state, *other arguments)."
            )
        return self.last

    # ---- states

    def take_state(self, number: int, state: Any, *, stacked: Any, alone: bool) -> GivenState:
        """Take a state argument; leaves that differ between devices vary from now on.

        With other arguments it is known which leaves the step keeps uniform; then only keys and
        whole numbers count.
        """
        name, by_device = axes.argument_name(self._fun, number), self._setting.by_device
        state_given = GivenState.of(state, name, by_device, stacked, self.known.get(number))
        self.known[number] = state_given.type
        self._add_varying(number, state_given.unequal_leaves(only_exact=not alone))
        return state_given

    def place_state(self, number: int, state_given: GivenState, program: StepProgram | None) -> Any:
        """Place one argument of the state on the mesh."""
        if program is None:
            setting, varying = self._setting, self._varying[number, state_given.type]
            kinds, by_device = state_given.type.leaves, setting.by_device
            shardings = shardings_of(setting.shardings, by_device, state_given.short_paths, kinds)
            pairs = [
                (by_device, True) if n in varying and state_given.stacked[n] else (sharding, False)
                for n, sharding in enumerate(shardings)
            ]
        else:
            leaves = [leaf for leaf in program.leaves.values() if leaf.argument == number]
            pairs = [(leaf.sharding, not leaf.uniform) for leaf in leaves]
        values = [
            state_given.put(n, sharding, varies=varies)
            for n, (sharding, varies) in enumerate(pairs)
        ]
        return jax.tree.unflatten(state_given.type.structure, values)

    def map_state(self, change: Callable[[Leaf], Any], what: str) -> Any:
        """Return a tree like the state, or a tuple of trees, of what is made of each leaf."""
        leaves, trees = self.known_program(what).leaves.values(), []
        for number in self._setting.state:
            values = [change(leaf) for leaf in leaves if leaf.argument == number]
            trees.append(jax.tree.unflatten(self.known[number].structure, values))
        return trees[0] if len(trees) == 1 else tuple(trees)

    def _add_varying(self, number: int, leaves: set[int]) -> None:
        varying = self._varying.setdefault((number, self.known[number]), set())
        if not leaves <= varying:
            varying |= leaves
            self._ready.clear()  # of programs that took them for uniform

    # ---- a call whose types were not seen before

    def _find(self, call: Call, types: list[Any]) -> StepProgram:
        state, size = self._types_of_state(call, types), self._setting.size
        leaf_axes = list(call.axes)
        for place, kind in state.items():
            types[place] = jax.ShapeDtypeStruct((size, *kind.shape), kind.dtype)
            leaf_axes[place] = 0
        for place, (kind, axis) in enumerate(zip(types, leaf_axes, strict=True)):
            rank = len(kind.shape)
            if axis is not None and (not -rank <= axis < rank or kind.shape[axis] != size):
                raise MappedAxisError(
                    f"'{call.fun_name}' is mapped over {size} devices, but {call.paths()[place]} "
                    f"has shape {tuple(kind.shape)}, which is to be {size} along dimension {axis}. "
                    "Give [N, b, ...] for N devices, as place_batch makes it of rows."
                )
        typed = dataclasses.replace(call, leaves=types, axes=tuple(leaf_axes))
        program = self._build(typed, state)
        for place, leaf in program.leaves.items():
            self._check_form(leaf, jnp.shape(call.leaves[place]))
        return program

    def _check_form(self, leaf: Leaf, shape: tuple[int, ...]) -> None:
        """Raise ArgumentError for a leaf that is stacked and uniform, or may be stacked."""
        size, is_said = self._setting.size, self.known[leaf.argument].is_said
        if shape == leaf.type.shape and not leaf.uniform and shape[:1] == (size,) and not is_said:
            raise ArgumentError(
                f"{leaf.path} of shape {shape} begins to vary at {leaf.origin}: it may have one "
                f"value for each of {size} devices, or one for all. Say which, by "
                "view.place(state, *other arguments, stacked=...)."
            )
        if shape != leaf.type.shape and leaf.uniform:
            raise ArgumentError(
                f"{leaf.path} has shape {tuple(shape)}, and the step keeps one value of it, of "
                f"shape {leaf.type.shape}. Place a state of pmap once, by "
                "state = view.place(state, stacked=True)."
            )

    def _build(self, call: Call, state: dict[int, jax.ShapeDtypeStruct]) -> StepProgram:
        places = {
            number: [place for place in state if call.owners[place] == number]
            for number in self._setting.state
        }
        varying = frozenset(
            numbered[n]
            for number, numbered in places.items()
            for n in self._varying.get((number, self.known[number]), ())
        )
        key = (call.structure, call.static, varying, *map(_key_of, call.leaves))
        if key in self._programs:
            return self._programs[key]
        with meshes.outside_of_meshes():
            program = traced_steps.build(self._setting, call, state, varying)
        if program.is_cacheable:
            self._programs[key] = program
        for number, numbered in places.items():
            self._add_varying(
                number, {n for n, place in enumerate(numbered) if not program.leaves[place].uniform}
            )
        self._warn_of_unsharded(program)
        return program

    def _warn_of_unsharded(self, program: StepProgram) -> None:
        """Warn once of each leaf that was to be sharded and varies."""
        leaves = [leaf for leaf in program.leaves.values() if leaf.is_kept_from_sharding]
        lines = [
            f"{leaf.path}, {human_bytes(leaf.bytes_per_device)} per device, begins to vary at "
            f"{leaf.origin}"
            for leaf in leaves
            if leaf.path not in self._warned
        ]
        self._warned.update(leaf.path for leaf in leaves)
        if lines:
            warn_user(
                f"Leaves of the state are not sharded, for each device has others: "
                f"{'; '.join(lines)}. Average them, or their gradients, over devices "
                "(jax.lax.pmean) before that line; or let shardings= be a function that gives "
                "PartitionSpec() for them.",
                UserWarning,
            )

    def _types_of_state(self, call: Call, types: Sequence[Any]) -> dict[int, jax.ShapeDtypeStruct]:
        """Return the type of each leaf of the state on one device, `[*s]`, by its place."""
        args, _ = call.rebuild(call.leaves)
        by_place: dict[int, jax.ShapeDtypeStruct] = {}
        for number in self._setting.state:
            places = [place for place, owner in enumerate(call.owners) if owner == number]
            known, structure = self.known.get(number), jax.tree.structure(args[number])
            shapes = [types[place].shape for place in places]
            if known is None or not known.stacked_leaves(structure, shapes, self._setting.size):
                kinds = tuple(jax.ShapeDtypeStruct(types[n].shape, types[n].dtype) for n in places)
                known = self.known[number] = StateType(structure, kinds)
            by_place.update(zip(places, known.leaves, strict=True))
        return by_place


def _key_of(kind: Any) -> tuple:
    return kind.shape, kind.dtype, kind.weak_type
