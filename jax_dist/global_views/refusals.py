"""What the global view refuses, in words: one builder for each error. The caller raises it."""

from collections.abc import Sequence
from typing import TypeVar

from jax_dist.errors import (
    ArgumentTypeError,
    DeviceCountError,
    GlobalViewError,
    MappedAxisError,
    PlacementError,
    UnsupportedError,
    message,
)

_Error = TypeVar("_Error", bound=Exception)


def _of(kind: type[_Error]):
    def made(*, what: str, which: Sequence[str], why: str, do: str) -> _Error:
        return kind(message(what=what, which=which, why=why, do=do))

    return made


_unsupported = _of(UnsupportedError)
_device_count = _of(DeviceCountError)
_mapped_axis = _of(MappedAxisError)
_global_view = _of(GlobalViewError)
_argument_type = _of(ArgumentTypeError)
_placement = _of(PlacementError)


def needs_newer_jax(version: str) -> UnsupportedError:
    return _unsupported(
        what="jax_dist.global_view needs jax 0.10 or newer",
        which=[f"jax is {version}"],
        why="it reads traced programs, whose form was another one before",
        do="Upgrade jax, or keep jax_dist.pmap, which works from jax 0.7.2 on.",
    )


def reference_between_islands(line: str) -> UnsupportedError:
    return _unsupported(
        what="a reference (jax.new_ref) lives across a sum over devices",
        which=[f"it is used by the equations from {line or 'an unknown line'} on"],
        why="what is before such a sum and what is after it run in two shard_maps, and a "
        "reference cannot leave one",
        do="Read the reference before the collective, and make a new one after it.",
    )


def nested_map(fun_name: str, regions: Sequence[str]) -> UnsupportedError:
    return _unsupported(
        what=f"'{fun_name}' calls a mapped function inside",
        which=[f"a pmap over {', '.join(sorted(map(repr, regions)))}"],
        why="the global view cuts over one mapped axis",
        do="Map once, over a mesh of all devices, or keep jax_dist.pmap for this function.",
    )


def constrained_inside(line: str, sharding: object) -> UnsupportedError:
    return _unsupported(
        what="the mapped function cuts an array over the mapped axis itself",
        which=[f"with_sharding_constraint at {line or 'an unknown line'}: {sharding}"],
        why="it is the program of one device, which has nothing to cut over that axis",
        do="Remove the constraint; say how the state lies by shardings=.",
    )


def not_in_mesh(axis: object, names: Sequence[object]) -> DeviceCountError:
    return _device_count(
        what=f"the mesh has no axis {axis!r}",
        which=[f"mesh.axis_names is {tuple(names)}"],
        why="the mapped axis of the function is one of the mesh's",
        do=f"Name it so, as in Mesh(devices, ({axis!r},)), or leave mesh out.",
    )


def size_is_not_mesh(
    fun_name: str, path: str, shape: Sequence[int], axis: int, size: int
) -> MappedAxisError:
    return _mapped_axis(
        what=f"'{fun_name}' is mapped over {size} devices",
        which=[f"{path} has shape {tuple(shape)}, which is to be {size} along dimension {axis}"],
        why="each device takes one slice",
        do="Give [N, b, ...] for N devices, as place_batch makes it of rows.",
    )


def no_state_argument(fun_name: str, number: int, count: int) -> GlobalViewError:
    return _global_view(
        what=f"'{fun_name}' was called without its state",
        which=[f"state={number}, and the call has {count} positional arguments"],
        why="the state is the argument that is carried from call to call",
        do="Give its position by state=, or state=None for a function that carries nothing.",
    )


def no_state_result(fun_name: str, argument: str) -> GlobalViewError:
    return _global_view(
        what=f"'{fun_name}' gives no new state",
        which=[f"no result has the structure, shapes and dtypes of argument '{argument}'"],
        why="a state that is carried comes out as it goes in",
        do="Give the position of the carried argument by state=; None if there is none.",
    )


def varies_but_cut(path: str, spec: object, origin: str, inputs: Sequence[str]) -> GlobalViewError:
    return _global_view(
        what="a leaf of the state cannot be cut, for each device has another one",
        which=[f"{path}, to be cut as {spec}: {_begins(origin, inputs)}"],
        why="only what is the same on all devices can be kept in parts",
        do="Average it over devices (jax.lax.pmean) before that line, or let shardings give "
        "PartitionSpec() for it: it then stays as it was under pmap, one for each device.",
    )


def nothing_to_cut(fun_name: str, which: Sequence[str]) -> GlobalViewError:
    return _global_view(
        what=f"no leaf of the state of '{fun_name}' can be cut",
        which=which,
        why="only what is the same on all devices can be kept in parts",
        do="Average the gradients over devices (jax.lax.pmean) in the step, or use "
        "shardings='replicated'.",
    )


def result_varies(fun_name: str, path: str, origin: str, inputs: Sequence[str]) -> GlobalViewError:
    return _global_view(
        what=f"a result of '{fun_name}' is said to be shared (out_axes=None), and varies",
        which=[f"{path}: {_begins(origin, inputs)}"],
        why="of values that differ, one cannot stand for all",
        do="Average it over devices (jax.lax.pmean), or give out_axes=0 for it.",
    )


def bad_sharding(path: str, shape: Sequence[int], spec: object, why: str) -> GlobalViewError:
    return _global_view(
        what="shardings gives a layout that does not fit",
        which=[f"{path} of shape {tuple(shape)}: {spec!r}"],
        why=why,
        do="Give a PartitionSpec over the axes of the mesh, whose sizes divide the dimensions.",
    )


def unknown_choice(argument: str, value: object, choices: str) -> ArgumentTypeError:
    return _argument_type(
        what=f"'{argument}' of global_view is none of its choices",
        which=[f"{argument}={value!r}"],
        why="it decides where the state lies, and what is summed how",
        do=f"Give {choices}.",
    )


def slices_differ(path: str) -> PlacementError:
    return _placement(
        what="a leaf of the state is to be shared, and its slices are not equal",
        which=[f"{path}: other devices have other bits than the first"],
        why="the step makes it the same on all devices, so that one slice stands for all",
        do="Find out why the copies drifted apart; to go on from one of them, give "
        "jax_dist.unreplicate(state).",
    )


def stacked_in_trace(path: str) -> PlacementError:
    return _placement(
        what="a state with one slice for each device is given inside a traced function",
        which=[f"{path} has a dimension for devices, and the step makes it the same on all"],
        why="whether its slices are equal cannot be seen there",
        do="Place the state before, by state = view.place(state).",
    )


def stacked_or_not(size: int, path: str, shape: Sequence[int]) -> PlacementError:
    return _placement(
        what="the state may be one for each device, or may not",
        which=[f"all leaves have {size} as their first dimension, such as {path}: {shape}"],
        why=f"there are {size} devices, and flax.jax_utils.replicate gives such arrays",
        do="Say stacked=True, if the first dimension counts devices, or stacked=False.",
    )


def not_stacked(path: str, shape: Sequence[int], size: int) -> PlacementError:
    return _placement(
        what="the state is said to be stacked, and a leaf is not",
        which=[f"{path} has shape {tuple(shape)}, which does not begin with {size}"],
        why=f"a stacked state has one slice for each of {size} devices",
        do="Give stacked=False, or stack this leaf, too.",
    )


def lies_elsewhere(path: str, given: object, wanted: object) -> PlacementError:
    return _placement(
        what="a leaf of the state does not lie as the global view keeps it",
        which=[f"{path} lies as {given}, and is kept as {wanted}"],
        why="to move it in each call would cost more than the step",
        do="Place the state once, by state = view.place(state).",
    )


def no_leaf(method: str, path: str, shape: Sequence[int]) -> PlacementError:
    return _placement(
        what=f"'{method}' cannot tell what an array of the state is",
        which=[f"{path or 'it'} has shape {tuple(shape)}"],
        why="no leaf of the state has that shape, or it may be one value, or one for each device",
        do=f"Give the whole state to {method}, as place or the last call gave it.",
    )


def rows_not_divisible(path: str, rows: int, size: int) -> PlacementError:
    return _placement(
        what="the rows of a batch do not fit the devices",
        which=[f"{path} has {rows} rows here, for {size} devices"],
        why="each device takes as many",
        do=f"Give a multiple of {size} rows, or drop the last ones.",
    )


def no_rows(path: str, shape: Sequence[int]) -> PlacementError:
    return _placement(
        what="a leaf of a batch has no rows",
        which=[f"{path} has shape {tuple(shape)}"],
        why="place_batch cuts the first dimension over devices",
        do="Pass what all devices share to the function itself, with in_axes None for it.",
    )


def host_array(path: str, shape: Sequence[int], kind: str, processes: int) -> PlacementError:
    return _placement(
        what=f"an argument of a step of {processes} processes is of this process alone",
        which=[f"{path} of shape {tuple(shape)} is a {kind}"],
        why="it is cut over devices of all processes, and each process has another part of it",
        do="Place it first: view.place_batch(batch) takes the slices, or the rows, of each "
        "process, and view.place(state) a state.",
    )


def not_known_yet(what: str) -> GlobalViewError:
    return _global_view(
        what=f"'{what}' of a global view is not known yet",
        which=["it was neither called nor given a state with the other arguments"],
        why="which leaves are shared is found in the traced step",
        do="Call it first, or place(state, *the other arguments).",
    )


def _begins(origin: str, inputs: Sequence[str]) -> str:
    through = f", through {', '.join(inputs)}" if inputs else ""
    return f"it begins to vary at {origin}{through}"
