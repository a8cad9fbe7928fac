"""Writes down the calls of mapped functions, one folder a process, as they happen.

`calls.jsonl` holds one event a line, and each call's arrays lie beside it as `.npz`. Everything is
on disk when the call returns, for the program may end in any way.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from . import programs
from .texts import ProgramTexts

_LARGE = 32 * 2**20  # bytes; of larger arrays only digests are kept
_ENOUGH = 2**30  # bytes of one process, after which all arrays count as large
_ROWS = 64  # dimensions up to this size may be the device axis
_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)


@dataclasses.dataclass
class MappedPlace:
    """Where in the program a function is mapped."""

    file: str
    line: int
    instruction: int  # tells two of one line apart
    within: list[str]  # the functions of this file that were running, innermost first


@dataclasses.dataclass
class RecordedSite:
    """Where a function is mapped, and how often what was made there has been called."""

    number: int
    kind: str  # "pmap", "mapped", "shard_map", "jit" or "host"
    calls: int = 0


class CallRecorder:
    """What one process writes down.

    Args:
      folder: where the folders of the processes are made.
      files: the files that are being migrated.
    """

    def __init__(self, *, folder: str, files: list[str]):
        self.files: frozenset[str] = frozenset(os.path.realpath(file) for file in files)
        self._folder = _own_folder(folder)
        self._sites: dict[Any, RecordedSite] = {}
        self._left = _ENOUGH
        self._lock = threading.RLock()
        self._running = threading.local()
        self.texts = ProgramTexts(self._write)
        self._process = os.getpid()
        atexit.register(self._write_totals)

    def site(self, kind: str, place: MappedPlace, function: str) -> RecordedSite:
        """What is mapped again at one place, as in a loop, stays one site."""
        identity = kind, place.file, place.within[0], place.instruction, function
        with self._lock:
            known = self._sites.get(identity)
            if known is None:
                known = self._sites[identity] = RecordedSite(len(self._sites), kind)
                self._write(
                    event="site",
                    site=known.number,
                    kind=kind,
                    file=place.file,
                    within=place.within,
                    line=place.line,
                    function=function,
                )
            return known

    def open(self, site: RecordedSite, arguments: Any) -> RecordedCall | None:
        """The record of a call that begins; None where it is not to be written down."""
        if (
            os.getpid() != self._process or self.texts.is_tracing
        ):  # a fork: the folder is its parent's
            return None
        with self._lock:
            number = site.calls
            if _traced(arguments):
                self.found_inside(site)
                return None
            site.calls += 1
        return RecordedCall(self, site, number)

    def host(self, number: int, function: Callable, value: Any) -> Any:
        """The value of a host edit, written down as a call of its own."""
        site = self.site("host", MappedPlace("", 0, number, [""]), str(number))
        call = self.open(site, (value,))
        if call is None:
            return function(value)
        call.given((value,), {})
        leaves, tree = call.types((value,), {})
        with call:
            result = function(value)
            call.returned(result)
            call.traced(function, leaves, tree)
        return result

    def found_inside(self, site: RecordedSite) -> None:
        """The function is being traced, as a part of the jit that runs."""
        running = self.running()
        cover = running[0].number if running else None
        if cover != site.number:
            self._write(event="inside", site=site.number, cover=cover)

    def running(self) -> list[RecordedSite]:
        """The calls of this thread that have not returned, the outermost first."""
        if not hasattr(self._running, "sites"):
            self._running.sites = []
        return self._running.sites

    def write_call(self, call: RecordedCall) -> None:
        """The arrays first: an event without them would be taken for a crash of ours."""
        name = f"{call.site.number}-{call.number}.npz"
        arrays: dict[str, np.ndarray] = {}
        with self._lock:
            described = {
                side: [self._describe(f"{side}{i}", leaf, arrays) for i, leaf in enumerate(leaves)]
                for side, leaves in (("given", call.inputs), ("returned", call.outputs))
            }
            np.savez(os.path.join(self._folder, name), **arrays)  # pyright: ignore[reportArgumentType]
            self._write(
                event="call",
                site=call.site.number,
                call=call.number,
                arrays=name,
                raised=call.raised,
                text=call.text,
                **described,
            )

    def note(self, site: RecordedSite, problem: str) -> None:
        """Something of ours failed; the program goes on."""
        self._write(event="problem", site=site.number, problem=problem)

    def _describe(
        self, key: str, leaf: RecordedLeaf, arrays: dict[str, np.ndarray]
    ) -> dict[str, Any]:
        described: dict[str, Any] = {
            "path": leaf.path,
            "dtype": leaf.dtype,
            "shape": list(leaf.values.shape),
            "devices": leaf.devices,
            "parts": leaf.parts,
        }
        if leaf.values.nbytes > min(_LARGE, self._left):
            return described | _digests(leaf.values)
        self._left -= leaf.values.nbytes
        arrays[key] = leaf.values
        return described | {"key": key}

    def _write(self, **event: Any) -> None:
        with self._lock, open(os.path.join(self._folder, "calls.jsonl"), "a") as file:
            file.write(json.dumps(event) + "\n")

    def _write_totals(self) -> None:
        if os.getpid() == self._process and os.path.isdir(self._folder):
            for site in self._sites.values():
                self._write(event="total", site=site.number, calls=site.calls)


@dataclasses.dataclass
class RecordedLeaf:
    """One array of a call, copied: the program may donate or overwrite it."""

    path: str  # such as "[0].params['w']"
    dtype: str
    devices: int  # that hold it; 0 for an array of numpy
    parts: int  # into which it is cut; 1 where each device holds all of it
    values: np.ndarray  # in a dtype that numpy has


class RecordedCall:
    """One call, from before it to after it."""

    def __init__(self, recorder: CallRecorder, site: RecordedSite, number: int):
        self.site = site
        self.number = number
        self.inputs: list[RecordedLeaf] = []
        self.outputs: list[RecordedLeaf] = []
        self.raised: str | None = None
        self.text: int | None = None  # the number of that of its program
        self._recorder = recorder
        self._inside = False

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies the arguments, before they may be donated."""
        self.inputs = self._leaves(args) + self._leaves(kwargs)

    def traced(self, function: Callable, leaves: list[Any], tree: Any) -> None:
        """Writes down its program; takes the types of what it was called with."""
        if not self._inside:
            texts, site = self._recorder.texts, self.site
            try:  # on the host, a number of Python is one: numpy may take it
                numbers = site.kind != "host"
                self.text = texts.number(site.number, function, leaves, tree, numbers=numbers)
            except Exception as problem:  # noqa: BLE001  # the program goes on without a text
                self._recorder.note(self.site, repr(problem))

    @staticmethod
    def types(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """The leaves of the arguments, with types in place of arrays, and their structure."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        return [programs.abstract(leaf) for leaf in leaves], tree

    def returned(self, result: Any) -> None:
        """Copies the results; a traced one means that the call was part of a larger program."""
        if _traced(result):
            self._inside = True
        else:
            self.outputs = self._leaves(result)

    def __enter__(self) -> RecordedCall:
        self._recorder.running().append(self.site)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._recorder.running().pop()
        if self._inside:
            self._recorder.found_inside(self.site)
            return
        self.raised = None if kind is None else kind.__name__
        try:
            self._recorder.write_call(self)
        except Exception as problem:  # noqa: BLE001  # the program must not fail because of us
            self._recorder.note(self.site, repr(problem))

    def _leaves(self, tree: Any) -> list[RecordedLeaf]:
        try:
            flat, _ = jax.tree_util.tree_flatten_with_path(tree)
            return [
                _leaf(jax.tree_util.keystr(path), leaf)
                for path, leaf in flat
                if isinstance(leaf, _NUMBERS) and getattr(leaf, "dtype", None) != np.dtype(object)
            ]
        except Exception as problem:  # noqa: BLE001  # a bad argument is for the program to refuse
            self._recorder.note(self.site, repr(problem))
            return []


def _leaf(path: str, leaf: Any) -> RecordedLeaf:
    devices, parts = _placement(leaf)
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__))
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_addressable:
            leaf = jax.device_get(leaf)
        else:  # of several processes: what this one has
            leaf = np.stack([jax.device_get(shard.data) for shard in leaf.addressable_shards])
    return RecordedLeaf(path, dtype, devices, parts, _plain(np.array(leaf)))


def _placement(leaf: Any) -> tuple[int, int]:
    if not isinstance(leaf, jax.Array):
        return 0, 0
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    return len(indices), len({str(index) for index in indices.values()})


def _plain(values: np.ndarray) -> np.ndarray:
    """bfloat16, float8 and int4 as a larger type: the same numbers, without their library."""
    if values.dtype.isbuiltin == 1:
        return values
    is_integer = "int" in str(values.dtype)
    return values.astype(np.int8 if is_integer else np.float32)


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree_util.tree_leaves(tree))


def _digests(values: np.ndarray) -> dict[str, Any]:
    """Enough to tell whether two large arrays are equal, also after a device axis went away."""
    rows = values if values.ndim and values.shape[0] <= _ROWS else ()
    return {
        "digest": _digest(values),
        "rows": [_digest(row) for row in rows],
        "mean": None if values.dtype.kind == "c" else float(np.mean(values, dtype=np.float64)),
    }


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _own_folder(folder: str) -> str:
    """The next free number; making a folder either succeeds or finds it taken."""
    number = 0
    while True:
        own = os.path.join(folder, f"process-{number}")
        try:
            os.mkdir(own)
            return own
        except FileExistsError:
            number += 1
