"""What a mapped function refuses, in words: one builder for each error. The caller raises it."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence

from jax_dist.errors import (
    ArgumentTypeError,
    AxesError,
    AxesTypeError,
    DeviceCountError,
    MappedAxisError,
    NestingError,
    PlacementError,
    StaticArgumentError,
    UnboundAxisError,
    UnsupportedError,
    refusal,
)


def not_callable(fun: object) -> TypeError:
    return refusal(
        TypeError,
        what="pmap needs a function",
        which=[f"fun is a {type(fun).__name__}: {fun!r}"],
        why="it maps a function over devices",
        do="Pass the function first, as in pmap(step, axis_name='i').",
    )


def no_devices() -> DeviceCountError:
    return refusal(
        DeviceCountError,
        what="'devices' argument to pmap must be non-empty, or None.",
        which=["len(devices) is 0"],
        why="each slice runs on one of them",
        do="Give at least one device, or leave devices out to use all.",
    )


def not_devices(devices: object) -> ArgumentTypeError:
    do = "Give a list, as in devices=jax.devices(), or leave it out to use all."
    if isinstance(devices, int):
        do = f"For the first {devices}, give devices=jax.devices()[:{devices}]."
    return refusal(
        ArgumentTypeError,
        what="'devices' argument to pmap must be a sequence of devices, or None",
        which=[f"devices={devices!r}, of type {type(devices).__name__}"],
        why="slice k of the mapped axis runs on device k of it",
        do=do,
    )


def unknown_choice(argument: str, value: object, choices: Sequence[str]) -> ValueError:
    why = {
        "arrays": "it says whether results show the slices of one process or of all",
        "captures": "it says what becomes of arrays that the function takes from around it",
        "gathers": "it says what becomes of an all_gather that is only reduced",
    }
    return refusal(
        ValueError,
        what=f"pmap {argument} must be {' or '.join(map(repr, choices))}",
        which=[f"{argument}={value!r}"],
        why=why[argument],
        do=f"Leave it out for {choices[0]!r}.",
    )


def mapped_sizes_differ(fun_name: str, sizes: Mapping[str, int]) -> MappedAxisError:
    """`sizes`: argument path to size, as in `{"batch['x']": 8, "mask": 7}`."""
    return refusal(
        MappedAxisError,
        what=f"pmap of '{fun_name}' got arguments of different sizes along the mapped axis",
        which=[f"{path} has size {size}" for path, size in sizes.items()],
        why="every device takes one slice of each mapped argument",
        do="Slice them alike, or give in_axes=None to what all devices share.",
    )


def nothing_mapped(fun_name: str, paths: Sequence[str]) -> MappedAxisError:
    return refusal(
        MappedAxisError,
        what=f"pmap of '{fun_name}' requires at least one argument with a mapped axis",
        which=[f"{path} has in_axes=None" for path in paths] or ["there is no array argument"],
        why="the size of the mapped axis is read from the arguments",
        do="Map one argument, for example jax.numpy.arange(size) with in_axes=0.",
    )


def nothing_in_axis(fun_name: str, paths: Sequence[str]) -> MappedAxisError:
    return refusal(
        MappedAxisError,
        what=f"pmap of '{fun_name}' got a mapped axis without any slice",
        which=[f"{path} has size 0 along its mapped axis" for path in paths],
        why="each device takes one slice",
        do="Pass at least one slice, or do not call it for an empty batch.",
    )


def arguments_are_no_arrays(
    fun_name: str, values: Mapping[str, object], names: Mapping[str, str]
) -> ArgumentTypeError:
    """`values`: argument path to value; `names`: the same to "a str", and so on."""
    return refusal(
        ArgumentTypeError,
        what=f"pmap of '{fun_name}' cannot take a value that is no array",
        which=[f"{path} is {names[path]}: {reprlib.repr(value)}" for path, value in values.items()],
        why="arguments are cut into slices, or copied to all devices",
        do="Bind it by functools.partial, or name its position in static_broadcasted_argnums.",
    )


def list_of_numbers(fun_name: str, name: str, length: int) -> AxesError:
    return refusal(
        AxesError,
        what=f"pmap of '{fun_name}' got a list of numbers where an array is mapped",
        which=[f"{name} is a list of {length} numbers, each of shape ()"],
        why="a list is a tree of arguments, each of which would have to be cut into slices",
        do=f"Pass one array: jax.numpy.asarray({name}).",
    )


def unbound_axis(fun_name: str, axis: str, known: Sequence[object]) -> UnboundAxisError:
    """`known`: the axes of this pmap, and of those around it, that the user has named."""
    names = [f"axis_name={name!r} is mapped" for name in known]
    return refusal(
        UnboundAxisError,
        what=f"Found an unbound axis name: {axis}, in pmap of '{fun_name}'",
        which=names or ["this pmap was given no axis_name"],
        why="a collective goes over an axis that a pmap or vmap around it has named",
        do=f"Give axis_name={axis!r} to pmap, or use the name that it has.",
    )


def groups_leave_some_out(
    fun_name: str, where: str, groups: Sequence[Sequence[int]], size: int
) -> AxesError:
    return refusal(
        AxesError,
        what=f"pmap of '{fun_name}' has axis_index_groups that do not hold each index once",
        which=[f"{[list(group) for group in groups]} at {where or 'an unknown line'}"],
        why=f"the mapped axis has size {size}, and each of its devices takes part",
        do=f"Put the indices 0 to {size - 1} into groups of one size, each of them once.",
    )


def axis_out_of_range(fun_name: str, which: Iterable[str], argument: str) -> AxesError:
    """`which`: lines such as `x has shape (), in_axes 0`; `argument`: in_axes or out_axes."""
    return refusal(
        AxesError,
        what=f"pmap of '{fun_name}' got an {argument} that is out of range",
        which=list(which),
        why="the mapped axis must be one of the dimensions of the array",
        do=f"Change {argument}, or give None to what is not mapped.",
    )


def output_is_no_array(fun_name: str, path: str, value: object) -> AxesTypeError:
    return refusal(
        AxesTypeError,
        what=f"pmap of '{fun_name}' cannot return a value that is no array",
        which=[f"output{path} is a {type(value).__name__}: {value!r}"],
        why="each device computes its own value, and they are put together along out_axes",
        do="Return arrays, numbers, and containers of them.",
    )


def axes_not_a_prefix(
    fun_name: str, argument: str, at: str, prefix: object, value: str, *, keywords: bool
) -> AxesError:
    """`at`: path of the first mismatch; `value`: what stands there, in words."""
    full = "positional arguments" if argument == "in_axes" else "output"
    do = f"Make {argument} a tree prefix of the {full}: an integer or None stands for all below it."
    if keywords:
        do += " Note that each argument passed by keyword is mapped over its leading axis."
    return refusal(
        AxesError,
        what=f"pmap of '{fun_name}' got an {argument} that does not fit its {full}",
        which=[f"{argument}{at} is {prefix!r}, but there stands {value}"],
        why=f"{argument} must have the structure of the {full}, down to its integers and None",
        do=do,
    )


def axes_of_wrong_type(argument: str, value: object, leaf: object) -> AxesTypeError:
    return refusal(
        AxesTypeError,
        what=f"pmap {argument} must be an int, None, or a container of these",
        which=[f"{argument}={value!r} holds {leaf!r}, of type {type(leaf).__name__}"],
        why="it says which dimension of each array is mapped",
        do="Give the number of the dimension, or None for what is not mapped.",
    )


def too_few_devices(
    fun_name: str, needed: int, available: int, platform: str, sizes: Mapping[str, int]
) -> DeviceCountError:
    """`sizes`: axis name to size, outermost first."""
    return refusal(
        DeviceCountError,
        what=f"pmap of '{fun_name}' needs {needed} devices, but there are {available}",
        which=[f"axis {name!r} has size {size}" for name, size in sizes.items()]
        + [f"{available} {platform} devices"],
        why="each slice along the mapped axis runs on a device of its own",
        do="Map fewer slices, or give virtual=True to run several of them on each device.",
    )


def devices_of_another_length(fun_name: str, needed: int, given: int) -> DeviceCountError:
    return refusal(
        DeviceCountError,
        what=f"pmap of '{fun_name}' got {given} devices for an axis of size {needed}",
        which=[f"the mapped axis needs {needed}", f"len(devices) is {given}"],
        why="with devices= given, each of them runs one slice",
        do=f"Give {needed} devices, or slice the arguments into {given}.",
    )


def size_not_as_promised(fun_name: str, axis_size: int, received: int) -> MappedAxisError:
    return refusal(
        MappedAxisError,
        what=f"pmap of '{fun_name}' was promised axis_size={axis_size}, but received another",
        which=[f"over all processes, the arguments have size {received}"],
        why="axis_size is the size of the mapped axis over all processes",
        do=f"Drop axis_size, or give axis_size={received}.",
    )


def uneven_processes(fun_name: str, counts: Mapping[int, int], size: int) -> DeviceCountError:
    return refusal(
        DeviceCountError,
        what=f"pmap of '{fun_name}' cannot spread an axis of size {size} over the processes",
        which=[f"process {process} has {count} devices" for process, count in counts.items()],
        why="every process runs the same number of slices, on devices of its own",
        do="Give each process the same number of slices, at most one a device.",
    )


def scattered_devices(fun_name: str) -> DeviceCountError:
    return refusal(
        DeviceCountError,
        what=f"pmap of '{fun_name}' cannot be traced over these devices",
        which=["devices= does not hold the devices of each process side by side"],
        why="inside jit, scan or grad, a process sees its own slices as one array",
        do="Order devices by process, with as many of each process.",
    )


def inner_devices_given(fun_name: str) -> NestingError:
    return refusal(
        NestingError,
        what=f"pmap of '{fun_name}' is called inside another mapped function",
        which=["it was given devices= or backend="],
        why="the outermost pmap chooses the devices of all of them",
        do="Give devices= to the outermost pmap only.",
    )


def under_another_mesh(fun_name: str, devices: int, others: int) -> NestingError:
    return refusal(
        NestingError,
        what=f"pmap of '{fun_name}' is traced under a mesh that it does not fit",
        which=[
            f"its mapped axis has size {devices}",
            f"the mesh set by jax.set_mesh has {others} devices",
        ],
        why="a program runs on one set of devices, and each takes as many slices",
        do="Set a mesh whose size divides that of the axis, or call it outside of traces.",
    )


def inside_foreign_shard_map(fun_name: str, axes: Sequence[object]) -> NestingError:
    return refusal(
        NestingError,
        what=f"pmap of '{fun_name}' is called inside a shard_map or pmap that is not ours",
        which=[f"its manual axes are {tuple(axes)!r}"],
        why="its mesh has no axis left for this pmap",
        do="Map the outer function with jax_dist.pmap too, or call jax.vmap inside.",
    )


def static_argument_missing(
    fun_name: str, static: tuple[int, ...], positional: int
) -> StaticArgumentError:
    return refusal(
        StaticArgumentError,
        what=f"pmap of '{fun_name}' was called without one of its static arguments",
        which=[
            f"static_broadcasted_argnums is {static}",
            f"the call has {positional} positional argument{'s' * (positional != 1)}",
        ],
        why="static arguments are found by their position",
        do="Pass them by position.",
    )


def static_argument_unhashable(fun_name: str, path: str, value: object) -> StaticArgumentError:
    return refusal(
        StaticArgumentError,
        what=f"Non-hashable static arguments are not supported by pmap of '{fun_name}'",
        which=[f"{path} is a {type(value).__name__}: {value!r}"],
        why="each new value of a static argument is compiled for, and found again by its hash",
        do="Pass a hashable value (a tuple for a list), or map it with in_axes=None.",
    )


def bad_argument_numbers(argument: str, value: object) -> ValueError:
    return refusal(
        ValueError,
        what=f"pmap {argument} must hold non-negative integers",
        which=[f"{argument}={value!r}"],
        why="arguments are counted from the first one, which is 0",
        do="Count the position of the argument from the left.",
    )


def no_virtual_size(fun_name: str, size: int, devices: int) -> DeviceCountError:
    return refusal(
        DeviceCountError,
        what=f"pmap of '{fun_name}' cannot share {size} slices evenly among the devices given",
        which=[f"the mapped axis has size {size}", f"len(devices) is {devices}"],
        why="with virtual=True every device runs the same number of slices",
        do="Give a number of devices that divides the size of the axis.",
    )


def no_permutation(size: int, pairs: Sequence[tuple[int, int]], where: str) -> AxesError:
    return refusal(
        AxesError,
        what="ppermute sources and destinations must be unique, and slices of its axes",
        which=[f"{[tuple(pair) for pair in pairs]} at {where or 'an unknown line'}"],
        why=f"its axes have {size} slices, numbered from 0, and each gets one value",
        do=f"Give pairs of indices from 0 to {size - 1}, each of them at most once a side.",
    )


def collective_on_slices(fun_name: str, primitive: str, where: str) -> UnsupportedError:
    return refusal(
        UnsupportedError,
        what=f"pmap of '{fun_name}' cannot run a collective on several slices a device",
        which=[f"{primitive} at {where or 'an unknown line'}"],
        why="the slices of one device run as one vmap, for which it has no rule here",
        do="Give it as many devices as slices, or use another collective.",
    )


def neither_local_nor_global(
    fun_name: str, path: str, size: int, local: int, whole: int
) -> PlacementError:
    return refusal(
        PlacementError,
        what=f"pmap of '{fun_name}' cannot tell which slices this array holds",
        which=[
            f"{path} has size {size} along the mapped axis",
            f"this process runs {local} slices, all processes together {whole}",
        ],
        why="an array of this process holds its own slices, a global one holds all",
        do=f"Pass the {local} slices of this process, or a global array of {whole}.",
    )


def local_array_under_trace(fun_name: str) -> PlacementError:
    return refusal(
        PlacementError,
        what=f"pmap of '{fun_name}' got an array that only this process can see, while traced",
        which=["an argument is committed to devices of this process"],
        why="under grad, vmap or jit the whole program runs on the devices of all processes",
        do="Pass NumPy arrays there, or make global arrays first with jax_dist.shard.",
    )


def shards_do_not_match(what: str, shards: int, devices: int) -> PlacementError:
    return refusal(
        PlacementError,
        what=f"{what} got {shards} shards for {devices} devices",
        which=[f"len(shards) is {shards}", f"len(devices) is {devices}"],
        why="each device gets one shard",
        do="Give as many shards as devices.",
    )


def shards_differ(path: str, kinds: Sequence[str]) -> PlacementError:
    return refusal(
        PlacementError,
        what="device_put_sharded got shards that do not make one array",
        which=[f"shard {i}{path} is {kind}" for i, kind in enumerate(kinds)],
        why="the shards become the slices of one array, along a new leading dimension",
        do="Give shards of one structure, with the same shapes and dtypes.",
    )


def not_replicated(path: str, why_not: str) -> PlacementError:
    return refusal(
        PlacementError,
        what="unreplicate got a value that has no leading axis of devices",
        which=[f"{path} {why_not}"],
        why="it takes the first slice along the leading axis of each array",
        do="Pass what pmap or device_put_replicated returned.",
    )
