"""Refusals in words that several modules use; the caller raises the error."""

from collections.abc import Iterable, Mapping

from jax_dist._usage import nearest
from jax_dist.errors import MappedAxisError, StaticArgumentError, UnsupportedError, refusal


def not_callable(fun: object) -> TypeError:
    return refusal(
        TypeError,
        what="pmap needs a function",
        which=[f"fun is a {type(fun).__name__}: {fun!r}"],
        why="it maps a function over devices",
        do="Pass the function first, as in pmap(step, axis_name='i').",
    )


def unknown_option(function: str, name: str, known: Iterable[str]) -> TypeError:
    first, _, _ = name.partition("_")
    alike = [each for each in known if each.startswith(first) or name in each]
    near = next(iter(alike), None) or nearest(name, known)
    return refusal(
        TypeError,
        what=f"{function}() got an unexpected keyword argument {name!r}",
        which=[f"it takes {', '.join(known)}"],
        why="the arguments of the function itself are given when it is called",
        do=f"Did you mean {near}? If not, leave it out." if near else "Leave it out.",
    )


def bad_argument_numbers(argument: str, value: object) -> ValueError:
    return refusal(
        ValueError,
        what=f"pmap {argument} must hold non-negative integers",
        which=[f"{argument}={value!r}"],
        why="arguments are counted from the first one, which is 0",
        do="Count the position of the argument from the left.",
    )


def runs_nothing(what: str, device: object) -> UnsupportedError:
    """`what` is to run on a device that only compiles."""
    return refusal(
        UnsupportedError,
        what=f"{what} cannot run on these devices, which only compile",
        which=[f"{device} is a device of a topology"],
        why="no such machine is attached: its compiler is here, and nothing else of it",
        do="Use .lower(...).compile(), with jax.ShapeDtypeStruct for arrays; to run it, give "
        "devices of jax.devices().",
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


def size_not_as_promised(fun_name: str, axis_size: int, received: int) -> MappedAxisError:
    return refusal(
        MappedAxisError,
        what=f"pmap of '{fun_name}' was promised axis_size={axis_size}, but received another",
        which=[f"over all processes, the arguments have size {received}"],
        why="axis_size is the size of the mapped axis over all processes",
        do=f"Drop axis_size, or give axis_size={received}.",
    )


def static_argument_missing(
    fun_name: str, static: tuple[int, ...], positional: int, most: int | None
) -> StaticArgumentError:
    """`positional` arguments were given; the function takes `most`, or any number."""
    which = [
        f"static_broadcasted_argnums is {static}",
        f"the call has {_counted(positional)}",
    ]
    do = "Pass them by position."
    if most is not None and static[-1] >= most:
        which.append(f"the function takes {_counted(most)}")
        do = f"Count from 0: the last position is {most - 1}." if most else "Leave it out."
    return refusal(
        StaticArgumentError,
        what=f"pmap of '{fun_name}' was called without one of its static arguments",
        which=which,
        why="static arguments are found by their position",
        do=do,
    )


def _counted(positional: int) -> str:
    return f"{positional} positional argument{'s' * (positional != 1)}"
