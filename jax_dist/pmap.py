"""The decorator that replaces `jax.pmap`, and the object that it returns.

There is one dispatcher for each function and set of options, kept as long as the function lives, so
`pmap(f)(x)` in a loop traces once.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import jax

from jax_dist._compat import Device
from jax_dist._fast_path import Decorated
from jax_dist._passes.captures import Captures
from jax_dist._passes.gathers import Gathers
from jax_dist._pmap.axes import AxisPrefix
from jax_dist._pmap.dispatch import PmapDispatcher
from jax_dist._pmap.options import Arrays, PmapOptions
from jax_dist.errors import ArgumentTypeError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Options(TypedDict, total=False):
    in_axes: AxisPrefix
    out_axes: AxisPrefix
    static_broadcasted_argnums: int | Iterable[int]
    devices: Sequence[Device] | None
    backend: str | None
    axis_size: int | None
    donate_argnums: int | Iterable[int]
    donate_argnames: str | Iterable[str]
    captures: Captures
    gathers: Gathers
    arrays: Arrays


class _Decorator(Protocol):
    """The result of `pmap` without a function."""

    def __call__(self, fun: Callable[_P, _R], /) -> "Mapped[_P, _R]": ...


@overload
def pmap(
    fun: Callable[_P, _R], axis_name: str | None = None, **options: Unpack[_Options]
) -> "Mapped[_P, _R]": ...
@overload
def pmap(*, axis_name: str | None = None, **options: Unpack[_Options]) -> _Decorator: ...
def pmap(
    fun: Callable[..., Any] | None = None,
    axis_name: str | None = None,
    *,
    in_axes: AxisPrefix = 0,
    out_axes: AxisPrefix = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    captures: Captures = "lift",
    gathers: Gathers = "reduce",
    arrays: Arrays = "local",
) -> Any:
    """Map a function over devices by `jit(shard_map)`, one slice of each argument on each device.

    Takes the arguments of `jax.pmap`, with the same meaning and the same numbers. It also works
    where `jax.pmap` fails: inside jit, scan and grad with several processes, nested, under another
    mesh set with `jax.set_mesh`, and with arrays on other devices. In the steady state, a call is
    one C++ dispatch.

    Args:
      fun: the function of one slice. It may use collectives over `axis_name`. Without it, `pmap`
        returns a decorator.
      axis_name: names the mapped axis for collectives.
      in_axes: which dimension of each positional argument is mapped: an integer, None for values
        that all devices share, or a tree of these that is a prefix of the arguments. A negative
        integer counts from the end. Arguments passed by keyword are mapped over their leading
        dimension.
      out_axes: where the mapped dimension goes in each result; None returns the value of the first
        device, and promises that all devices have the same value.
      static_broadcasted_argnums: positions of arguments that are compile-time constants; these must
        be hashable.
      devices: the devices to use, one slice on each, in this order; the same in every process.
      backend: "cpu", "gpu" or "tpu"; the platform whose devices to use if `devices` is not given.
      axis_size: the size of the mapped axis over all processes; it is only checked.
      donate_argnums: positions of arguments whose memory the results may take over, passed by
        position or by keyword; give the state of a training loop.
      donate_argnames: the same by name.
      captures: what to do with arrays of 1 kB or more that `fun` captures: "lift" them
        to arguments, placed on the devices once, with a warning; "warn" only; "allow" them; or
        raise an "error". As under jit, they keep the values that they have when `fun` is traced.
      gathers: "reduce" a `lax.all_gather` that is only reduced to one reduction, equal up to the
        order of summation; only where the result is "exact", to the bit; or "keep" it.
      arrays: with several processes, "local" shows each process its own slices, as `jax.pmap` does;
        "global" leaves results global, which is faster when they are the next call's arguments.

    Returns:
      The mapped function. It has `lower` and `trace`, as jit objects do, and `__wrapped__`, which
      is `fun`.

    Raises:
      TypeError: `fun` cannot be called, or in_axes or out_axes hold something else than integers.
      ValueError: `devices` is empty, or `captures`, `gathers` or `arrays` has an unknown value.
        When called: the sizes of the arguments differ, none is mapped, in_axes or out_axes does not
        fit, the axis does not fit the devices, or a static argument cannot be hashed.

    >>> import functools, jax, jax.numpy as jnp
    >>> @functools.partial(pmap, axis_name="i")
    ... def share(x):
    ...     return x / jax.lax.psum(x, "i")
    >>> share(jnp.arange(4.0)).tolist()
    [0.0, 0.1666666716337204, 0.3333333432674408, 0.5]

    See JEP 14273 on shard_map, and jax-ml/jax#2926 on why pmap in jit needed it.
    """
    if not isinstance(axis_name, str | None):
        raise ArgumentTypeError(
            f"pmap axis_name must be a str, got {axis_name!r}: JAX lowers no other names."
        )
    options = PmapOptions(
        fun_name="",
        axis_name=axis_name,
        in_axes=in_axes,
        out_axes=out_axes,
        static=static_broadcasted_argnums,  # pyright: ignore[reportArgumentType]  # normalized
        donated=donate_argnums,  # pyright: ignore[reportArgumentType]
        donated_names=donate_argnames,  # pyright: ignore[reportArgumentType]
        devices=devices,  # pyright: ignore[reportArgumentType]
        backend=backend,
        axis_size=axis_size,
        captures=captures,
        gathers=gathers,
        arrays=arrays,
    )
    decorate = functools.partial(_map, options)
    return decorate if fun is None else decorate(fun)


def _map(options: PmapOptions, fun: Callable[..., Any]) -> Any:
    """Return `fun` mapped by validated options, with a new or a cached dispatcher."""
    if not callable(fun):
        raise TypeError(f"pmap needs a function, got {fun!r}.")
    fake = _fake_pmap()
    if fake is not None:
        return fake(
            fun,
            options.axis_name,
            in_axes=options.in_axes,
            out_axes=options.out_axes,
            static_broadcasted_argnums=options.static,
        )
    dispatchers = _dispatchers_of(fun)
    key = getattr(fun, "__func__", None), options.key
    dispatcher = dispatchers.get(key)
    if dispatcher is None:
        named = options.rename_for(fun)
        dispatcher = dispatchers[key] = PmapDispatcher(named, _weak_function(fun))
    return Mapped(fun, dispatcher, options)


def _fake_pmap() -> Callable[..., Any] | None:
    """Return `jax.pmap` if `chex.fake_pmap` has replaced it by a vmap, else None."""
    replacement: Any = jax.pmap
    while isinstance(replacement, functools.partial):
        replacement = replacement.func
    module = getattr(replacement, "__globals__", {}).get("__name__", "")
    return jax.pmap if module.partition(".")[0] == "chex" else None


# Dispatchers by options, by the id of a living function; of a bound method, which is a new object
# at each access, by that of its `__self__`. Not by equality of functions: two partial objects, or
# two models, may be equal now and not later.
_dispatchers: dict[int, dict[Hashable, PmapDispatcher]] = {}


def _dispatchers_of(fun: Callable[..., Any]) -> dict[Hashable, PmapDispatcher]:
    """Return the dispatchers of a function by options, a dict that is kept as long as it lives."""
    owner = fun.__self__ if isinstance(fun, types.MethodType) else fun
    dispatchers = _dispatchers.get(id(owner))
    if dispatchers is None:
        try:
            weakref.finalize(owner, _dispatchers.pop, id(owner), None).atexit = False
        except TypeError:  # no weak references to it: its dispatchers cannot be kept
            return {}
        dispatchers = _dispatchers[id(owner)] = {}
    return dispatchers


def _weak_function(fun: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that returns `fun`, without keeping it alive where Python allows it."""
    try:
        return weakref.WeakMethod(fun) if isinstance(fun, types.MethodType) else weakref.ref(fun)
    except TypeError:
        return lambda: fun


class Mapped(Decorated[_P, _R]):
    """A function that is mapped over devices.

    It has the name, docstring, signature and attributes of its function, and binds as a method.

    Attributes:
      __wrapped__: the function that it was made from.
    """

    __slots__ = ("_dispatcher", "_options")
    _kind = "jax_dist.pmap.Mapped"  # chex recognizes functions that JAX traces by "pmap." in this

    def __init__(self, fun: Callable[_P, _R], dispatcher: PmapDispatcher, options: PmapOptions):
        super().__init__(fun)
        self._dispatcher, self._options = dispatcher, options
        dispatcher.fast_path.attach(self)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the program for these arguments; `jax.ShapeDtypeStruct` will do for arrays.

        Returns:
          The program, on arguments that are sharded over the devices. Compiled, it is called like
          this function; captured arrays are handed in behind the scenes.
        """
        return self._dispatcher.lower(*args, **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the program for these arguments, or for arguments of these types; see `jax.jit`."""
        return self._dispatcher.trace(*args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the types of the results for these arguments; nothing is compiled."""
        return self.trace(*args, **kwargs).out_info

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mapped[_P, _R]":
        return self

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle by qualified name if possible (as functions are), else by options and function."""
        named_object: Any = sys.modules.get(self.__dict__["__module__"] or "")
        for part in self.__qualname__.split("."):
            named_object = getattr(named_object, part, None)
        if named_object is self:
            return self.__qualname__
        return _map, (self._options, self.__wrapped__)
