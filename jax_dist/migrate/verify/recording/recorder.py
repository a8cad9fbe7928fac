"""Stands in for what maps functions and for `jax.jit`, and writes down their calls.

Each process has a folder of its own, and writes as the calls happen:

`calls.jsonl` holds one event a line, and each call's arrays lie beside it as `.npz`. Everything is
on disk when the call returns, for the program may end in any way. What cannot be written is told by
`lost`.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import arrays, lost
from .call_programs import Arguments, ProgramTexts, is_traced
from .flow import Flow
from .functions import OfPlaces, Recorded, described, name_of, place_of
from .records import Records

_LARGE = 32 * 2**20  # bytes; of larger arrays only digests are kept
_KEPT = 2**30  # bytes of one process, after which all arrays count as large
_LIBRARIES = ("jax", "jaxlib", "jax_dist")  # what these map inside is not the user's call
_INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for name, folder in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@dataclasses.dataclass
class _Site:
    """Where a function is mapped, and how often what was made there has been called."""

    number: int
    kind: str  # "pmap", "mapped", "shard_map", "jit" or "host"
    calls: int = 0
    told: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)  # what need not be repeated


@dataclasses.dataclass
class _Target:
    """What is called in the place of a recorded function."""

    function: Callable
    what: str  # tells it from others that are made at its site
    static: tuple[int, ...] = ()  # arguments that are constants: they need not be arrays, nor trees
    static_names: tuple[str, ...] = ()


class _Thread(threading.local):
    def __init__(self):
        self.running: list[_Site] = []  # calls that have not returned, the outermost first


class CallRecorder:
    """What one process writes down.

    Args:
      folder: where the folders of the processes are made.
      files: the files that are being migrated.
      flow: where arrays come from and go to, if that is asked for.
    """

    def __init__(self, *, folder: str, files: list[str], flow: Flow | None = None):
        self._files: frozenset[str] = frozenset(os.path.realpath(file) for file in files)
        self._records = Records(folder)
        self._sites: dict[Any, _Site] = {}
        self._placed: dict[Any, OfPlaces] = {}  # so that each place gets one object
        self._left = _KEPT
        self._thread = _Thread()
        self._texts = ProgramTexts(self._records.write)
        self._flow = flow
        self._records.after_forks(self._begin_again)
        atexit.register(self._write_totals)

    # --- what is mapped

    def hooked(self, module: str, name: str, real: Callable) -> Callable:
        """`real`, whose results are recorded; the same in all else.

        Args:
          module: where it will be found, also by pickle.
          name: "pmap", "mapped" (of a helper in migrated code), "shard_map" or "jit".
          real: what it is without us.
        """

        @functools.wraps(real)
        def make(*args: Any, **kwargs: Any) -> Any:
            return made(sys._getframe(1), frozenset(), args, kwargs)

        def made(frame: Any, places: frozenset[int], args: Any, kwargs: Any) -> Any:
            given = bool(args) and callable(args[0])
            is_library = frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
            if is_library or type(frame.f_locals.get("self")).__name__ == "_Program":
                return real(*args, **kwargs)  # a part of what is recorded
            if callable(kwargs.get("fun")):  # pmap takes it by name too
                args = kwargs.pop("fun"), *args
            elif not args:  # a decorator with options
                return functools.partial(OfPlaces(make, made, places), **kwargs)
            elif not given:  # a mistake; let it say so
                return real(*args, **kwargs)
            return self._made(name, real, frame, places, args, kwargs)

        make.__module__ = module
        make._recorded_make = made  # pyright: ignore[reportAttributeAccessIssue]
        return make

    def _made(
        self, name: str, real: Callable, frame: Any, places: frozenset[int], args: Any, kwargs: Any
    ) -> Any:
        """A mapped or jitted function, which is recorded."""
        fun, *rest = args
        site = recorded = None
        if name == "jit":  # of a mapped function, it is that mapped function
            inner = fun
            while isinstance(inner, functools.partial):
                inner = inner.func
            if isinstance(inner, Recorded) and inner._recorded_site.kind != "jit":
                recorded, site = inner, inner._recorded_site
        if site is None:  # any other is a witness of its own
            file = os.path.realpath(frame.f_code.co_filename)
            if name == "jit" and file not in self._files and file.startswith(_INSTALLED):
                return real(*args, **kwargs)
            site = self._site(name, name_of(fun), **place_of(frame))
        for place in places:
            self._once(site, "place", place=place)
        prefix = "static_" if name == "jit" else "static_broadcasted_"
        static = _several(kwargs.get(f"{prefix}argnums"), int)
        if recorded is fun and not static:
            static = fun._recorded_static
        names = _several(kwargs.get("static_argnames"), str)
        if self._flow is not None:
            self._flow.mapped(site.number, fun)
        bare = fun._recorded_function if recorded is fun else fun
        options = (rest, kwargs) if name == "pmap" else ()
        what = described(bare, options) if recorded is None else recorded._recorded_what
        target = _Target(real(bare, *rest, **kwargs), what, static, names)
        self._once(site, "made", what=target.what)
        call = functools.partial(self._call, site, target)
        return Recorded(target.function, site, what, static, call)

    def placed(self, place: int, value: Any) -> Any:
        """The value of a place, from here on known as its own.

        Args:
          place: its number.
          value: what maps functions, a mapped function, or anything.

        Returns:
          None where nobody records what it does.
        """
        if type(value) is functools.partial:
            inner = self.placed(place, value.func)
            if inner is None or inner is value.func:
                return None if inner is None else value
            return functools.partial(inner, *value.args, **value.keywords)
        if isinstance(value, Recorded):
            self._once(value._recorded_site, "place", place=place)
            return value
        make, places = value, frozenset({place})
        if isinstance(value, OfPlaces):
            make, places = value._recorded_maker, places | value._recorded_places
        made = vars(make).get("_recorded_make") if isinstance(make, types.FunctionType) else None
        if made is not None:
            key = id(make), places
            return self._placed.setdefault(key, OfPlaces(make, made, places))
        if running := self._thread.running:  # what it does is a part of what these do
            self._once(running[0], "around", place=place)
            return value
        return None

    def _site(
        self,
        kind: str,
        function: str,
        *,
        file: str = "",
        line: int = 0,
        instruction: int = 0,
        within: Sequence[str] = ("",),
    ) -> _Site:
        """What is mapped again at one place, as in a loop, stays one site.

        Args:
          kind, function: as `_Site` has it, and the name.
          file, line, instruction: where it is mapped; the last tells two of one line apart.
          within: the functions of the file that were running, innermost first.
        """
        identity = kind, file, within[0], instruction, function
        with self._records.lock:
            site = self._sites.get(identity)
            if site is None:
                site = self._sites[identity] = _Site(len(self._sites), kind)
                place = {"file": file, "within": within, "line": line, "function": function}
                self._records.write(event="site", site=site.number, kind=kind, **place)
            return site

    # --- what is called

    def _call(self, site: _Site, target: _Target, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Calls a function, and writes down what it is given and returns.

        Args:
          site: where it was mapped.
          target: what to call.
          args, kwargs: all of them.
        """
        self._once(site, "called", what=target.what)
        arguments = self._arguments(site, args, kwargs)
        number = self._number(site, target, arguments, (args, kwargs))
        if number is None:
            return target.function(*args, **kwargs)
        constants = {position % len(args) for position in target.static if args}
        dynamic = tuple(None if i in constants else arg for i, arg in enumerate(args))
        words = {name: arg for name, arg in kwargs.items() if name not in target.static_names}
        given = self._leaves(site, dynamic) + self._leaves(site, words)
        if site.kind != "host":
            given = [(described, arrays.as_traced(values)) for described, values in given]
        flow = self._flow if site.kind == "pmap" else None
        if flow is not None:
            flow.given(site.number, args, words, tuple(constants))
        returned: list[arrays.Leaf] = []
        more: dict[str, Any] = {"raised": None, "text": None, "structure": None, "donated": []}
        inside = False
        running = self._thread.running
        running.append(site)
        try:
            result = target.function(*args, **kwargs)
            inside = is_traced(result)  # the call was part of a larger program
            if not inside:
                returned = self._leaves(site, result)
                if flow is not None:
                    flow.returned(site.number, result)
                more |= self._about(site, target, arguments, (args, kwargs), result)
            return result
        except BaseException as error:
            more["raised"] = type(error).__name__
            raise
        finally:
            running.pop()
            if inside:
                self._found_inside(site, None)
            else:
                self._write_call(site, number, given, returned, **more)

    def host(self, number: int, function: Callable, value: Any) -> Any:
        """The value of a host edit, written down as a call of its own."""
        site = self._site("host", str(number))
        return self._call(site, _Target(function, ""), (value,), {})

    def _arguments(self, site: _Site, args: Any, kwargs: Any) -> Arguments | None:
        """Their types, before the call, which may donate them."""
        try:
            return Arguments(args, kwargs)
        except Exception as problem:  # noqa: BLE001  # such as a constant that is no tree
            self._note(site, problem)
            return None

    def _number(
        self, site: _Site, target: _Target, arguments: Arguments | None, given: Any
    ) -> int | None:
        """Of a call that begins; None where it is not to be written down."""
        if not self._records.is_own or self._texts.is_tracing:
            return None
        with self._records.lock:
            if is_traced(given):
                self._found_inside(site, self._text(site, target, arguments))
                return None
            site.calls += 1
            return site.calls - 1

    def _found_inside(self, site: _Site, text: int | None) -> None:
        """The function is being traced, as a part of the jit that runs."""
        running = self._thread.running
        cover = running[0].number if running else None
        if cover != site.number:
            self._once(site, "inside", cover=cover, text=text)

    def _leaves(self, site: _Site, tree: Any) -> list[arrays.Leaf]:
        try:
            return arrays.leaves(tree, every=site.kind == "host")
        except Exception as problem:  # noqa: BLE001  # a bad argument is for the program to refuse
            self._note(site, problem)
            return []

    def _about(
        self,
        site: _Site,
        target: _Target,
        arguments: Arguments | None,
        given: Any,
        result: Any,
    ) -> dict[str, Any]:
        """What else is to be known of a call that returned."""
        found: dict[str, Any] = {"text": self._text(site, target, arguments)}
        try:
            if site.kind != "host":  # which JAX may not have been started for
                found["rank"] = jax.process_index()
            found["structure"] = arrays.structure(result, given)
            flat = enumerate(jax.tree.leaves(given))
            used = [i for i, e in flat if isinstance(e, jax.Array) and e.is_deleted()]
            return {**found, "donated": used}
        except Exception as problem:  # noqa: BLE001  # a node of the user's may do anything
            self._note(site, problem)
            return found

    def _text(self, site: _Site, target: _Target, arguments: Arguments | None) -> int | None:
        """The number of the text of its program."""
        if arguments is None:
            return None
        try:  # on the host, a number of Python is one: numpy may take it
            numbers = site.kind != "host"
            return self._texts.number(site.number, target.function, arguments, numbers=numbers)
        except Exception as problem:  # noqa: BLE001  # the program goes on without a text
            self._note(site, problem)
            return None

    # --- what is written

    def _write_call(
        self,
        site: _Site,
        number: int,
        given: list[arrays.Leaf],
        returned: list[arrays.Leaf],
        **more: Any,
    ) -> None:
        """The arrays first: an event without them would be taken for a crash of ours."""
        name = f"{site.number}-{number}.npz"
        kept: dict[str, np.ndarray] = {}
        try:
            with self._records.lock:
                for side, leaves in (("given", given), ("returned", returned)):
                    more[side] = []
                    for i, (about, values) in enumerate(leaves):
                        if values.nbytes > min(_LARGE, self._left):
                            more[side].append(about | arrays.digests(values))
                            continue
                        self._left -= values.nbytes
                        kept[f"{side}{i}"] = values
                        more[side].append(about | {"key": f"{side}{i}"})
                np.savez(os.path.join(self._records.folder(), name), **kept)  # pyright: ignore[reportArgumentType]
                self._records.write(
                    event="call", site=site.number, call=number, arrays=name, **more
                )
        except Exception as problem:  # noqa: BLE001  # the program must not fail because of us
            self._note(site, problem, call=number)  # or nobody would know of the call

    def _note(self, site: _Site, problem: Exception, **more: Any) -> None:
        """Something of ours failed; the program goes on."""
        said = f"{type(problem).__name__}: {_text_of(problem)}"
        self._records.write(event="problem", site=site.number, problem=said, **more)

    def _once(self, site: _Site, event: str, **more: Any) -> None:
        """Writes down of a site what holds from now on."""
        key = event, *more.values()
        if key not in site.told:
            site.told.add(key)
            self._records.write(event=event, site=site.number, **more)

    def _write_totals(self) -> None:
        if self._records.is_own and self._records.is_begun:
            for site in self._sites.values():
                self._records.write(event="total", site=site.number, calls=site.calls)
            if self._flow is not None:
                try:
                    self._flow.write(self._records.folder())
                except OSError:
                    lost.tell()

    def _begin_again(self) -> None:
        """In a forked process: nothing has been called yet."""
        self._flow = None  # it is that of the parent
        for site in self._sites.values():
            site.calls = 0
            site.told = {key for key in site.told if key[0] != "called"}


def _several(given: Any, one: type) -> tuple[Any, ...]:
    """What may be given as one, as several or not at all."""
    return () if given is None else (given,) if isinstance(given, one) else tuple(given)


def _text_of(error: BaseException) -> str:
    """What an exception says; only its type where that is code of its own, which may never end."""
    is_plain = type(error).__str__ is BaseException.__str__
    if is_plain and all(isinstance(each, str | int | float) for each in error.args):
        return str(error)[:1000]
    return type(error).__name__
