"""Refusals in words that several modules use; the caller raises the error."""

from collections.abc import Mapping

from jax_dist.errors import MappedAxisError, StaticArgumentError, refusal


def not_callable(fun: object) -> TypeError:
    return refusal(
        TypeError,
        what="pmap needs a function",
        which=[f"fun is a {type(fun).__name__}: {fun!r}"],
        why="it maps a function over devices",
        do="Pass the function first, as in pmap(step, axis_name='i').",
    )


def bad_argument_numbers(argument: str, value: object) -> ValueError:
    return refusal(
        ValueError,
        what=f"pmap {argument} must hold non-negative integers",
        which=[f"{argument}={value!r}"],
        why="arguments are counted from the first one, which is 0",
        do="Count the position of the argument from the left.",
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
