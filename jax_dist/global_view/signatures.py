"""The programs of a view by signature, and which leaves of its state vary."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jax_dist._pmap import axes, meshes
from jax_dist._pmap.body import Call, type_of
from jax_dist.errors import ArgumentError, MappedAxisError
from jax_dist.global_view.analysis import VaryingOrigin
from jax_dist.global_view.placement import StateType, UserState, shardings_of
from jax_dist.global_view.programs import StepProgram
from jax_dist.global_view.report import Leaf
from jax_dist.global_view.setting import Setting
from jax_dist.global_view.traced_steps import places_of

_StateKey: TypeAlias = tuple[int, StateType]  # of an argument


class Signatures:
    """The programs of one view, by the types of their arguments."""

    def __init__(self, fun: Callable, setting: Setting):
        self._fun, self._setting = fun, setting
        self._called: dict[Any, StepProgram] = {}  # by the types of calls
        self._programs: dict[Any, StepProgram] = {}  # by these, with the state as under pmap
        # Of a state, the leaves that vary in one of the programs: then they do in all of them.
        self._varying = collections.defaultdict[_StateKey, dict[int, VaryingOrigin]](dict)
        self.known: dict[int, StateType] = {}  # of each state argument
        self.last: StepProgram | None = None

    def program_for(self, call: Call) -> StepProgram:
        """Return the program for a call; state leaves are `[*s]`, or `[N, *s]` where they vary."""
        types = [type_of(leaf) for leaf in call.leaves]
        key = (call.structure, call.static, *map(_key_of, types))
        program = self._called.get(key)
        if program is None:
            program = self._find_or_build(call, types)
            self._called[key] = program
        self.last = program
        return program

    def _find_or_build(self, call: Call, types: list[Any]) -> StepProgram:
        """Return the program for `call`, whose leaves have these `types`; build it at first use."""
        state = self._types_of_state(call)
        places = {number: places_of(call, number) for number in state}
        leaf_axes, varying = list(call.axes), {}
        for number, kind in state.items():
            for place, leaf in zip(places[number], kind.leaves, strict=True):
                shape = (self._setting.size, *leaf.shape)
                types[place], leaf_axes[place] = jax.ShapeDtypeStruct(shape, leaf.dtype), 0
            origins = self._varying[number, kind]
            varying |= {places[number][n]: origin for n, origin in origins.items()}
        key = (call.structure, call.static, *map(_key_of, types))
        program = self._programs.get(key)
        if program is None or any(program.leaves[place].uniform for place in varying):
            typed = dataclasses.replace(call, leaves=types, axes=tuple(leaf_axes))
            if typed.size != self._setting.size:
                raise MappedAxisError(
                    f"'{call.fun_name}' is mapped over {self._setting.size} devices, but its "
                    f"arguments have {typed.size} slices. Give [N, b, ...] for N devices, as "
                    "place_batch makes it of rows."
                )
            with meshes.outside_of_meshes():
                program = StepProgram.build(self._setting, typed, state, varying)
            self._programs[key] = program
        for number, kind in state.items():
            leaves = [program.leaves[place] for place in places[number]]
            self._add_varying(number, kind, {n: x.origin for n, x in enumerate(leaves) if x.origin})
        for place, leaf in program.leaves.items():
            self._check_form(leaf, jnp.shape(call.leaves[place]))
        return program

    def _add_varying(
        self, number: int, kind: StateType, origins: Mapping[int, VaryingOrigin]
    ) -> None:
        """Record leaves of argument `number` that vary, by place, in all programs from now on."""
        if not origins.keys() <= self._varying[number, kind].keys():
            self._varying[number, kind] |= origins
            self._called.clear()  # of programs that take them for uniform

    def known_program(self, what: str) -> StepProgram:
        """Return the last program, for its report."""
        if self.last is None:
            raise ArgumentError(
                f"'{what}' of a global view is not known yet. Call it first, or "
                "place(state, *other arguments)."
            )
        return self.last

    def take_state(self, number: int, state: Any, *, stacked: Any) -> UserState:
        """Read argument `number` of the state; leaves that differ between devices now vary."""
        name, by_device = axes.argument_name(self._fun, number), self._setting.by_device
        taken = UserState.of(state, name, by_device, stacked, self.known.get(number))
        self.known[number] = taken.type
        self._called.clear()  # of programs that take it for another state
        origin = VaryingOrigin("place", "its copies differ")
        unequal = dict.fromkeys(taken.unequal_leaves(), origin)
        self._add_varying(number, taken.type, unequal)
        return taken

    def place_state(self, number: int, state: UserState) -> Any:
        """Place one argument of the state on the mesh."""
        setting, varying = self._setting, self._varying[number, state.type]
        shardings = shardings_of(setting.shardings, setting.by_device, state.type)
        values = [
            state.put(n, setting.sharding_of_varying(sharding.spec), varies=True)
            if n in varying
            else state.put(n, sharding, varies=False)
            for n, sharding in enumerate(shardings)
        ]
        return jax.tree.unflatten(state.type.structure, values)

    def map_state(self, change: Callable[[Leaf], Any], what: str) -> Any:
        """Return the state with `change(leaf)` for each leaf; several arguments give a tuple."""
        leaves, trees = self.known_program(what).leaves.values(), []
        for number in self._setting.state:
            values = [change(leaf) for leaf in leaves if leaf.argument == number]
            trees.append(jax.tree.unflatten(self.known[number].structure, values))
        return trees[0] if len(trees) == 1 else tuple(trees)

    def _types_of_state(self, call: Call) -> dict[int, StateType]:
        """Return the types of each state argument on one device."""
        args, _ = call.rebuild(call.leaves)
        for number in self._setting.state:
            leaves, structure = jax.tree.flatten(args[number])
            known, shapes = self.known.get(number), [jnp.shape(leaf) for leaf in leaves]
            if known is None or not known.stacked_leaves(structure, shapes, self._setting.size):
                types = [type_of(leaf) for leaf in leaves]
                kinds = tuple(jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in types)
                self.known[number] = StateType(structure, kinds)
        return {number: self.known[number] for number in self._setting.state}

    def _check_form(self, leaf: Leaf, shape: tuple[int, ...]) -> None:
        """Raise ArgumentError if `shape` is stacked but the leaf uniform, or if it is ambiguous."""
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


def _key_of(kind: Any) -> tuple:
    return kind.shape, kind.dtype, kind.weak_type
