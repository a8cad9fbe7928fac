"""The devices of a machine that is not here.

JAX compiles for them, by `jax.experimental.topologies`, without the hardware. This layer knows the
chips by their usual names, and says what is missing where a compiler is not installed.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from jax_dist import _compat, _usage
from jax_dist._compat.private import Device
from jax_dist._exceptions import text_of
from jax_dist.errors import UnsupportedError, refusal
from jax_dist.machines.chips import CHIPS, Chip, GpuChip, TpuChip


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """Devices that compile programs, and run none; made by `jax_dist.topology`."""

    name: str  # as `topology` takes it: "v5e:4x4"
    devices: tuple[Device, ...]
    memory: int  # bytes of one device that a program may use

    @property
    def hosts(self) -> int:
        """How many processes a job on this machine has."""
        return len({device.process_index for device in self.devices})


def topology(name: str) -> Topology:
    """The devices of a machine that is not here, to compile programs for.

    They go where devices go: `jax_dist.pmap(devices=...)`, a mesh, `jax_dist.explain`. Only
    `.lower(...)` and `.compile()` work on them; a call is an error.

    Args:
      name: a slice of TPUs, as "v5e:4x4", "v5p:2x2x4" or "v5e-16"; or GPUs: "h100" for a host of 8,
        "h100:4" for one of 4, "h100:2x8" for two hosts of 8.

    Raises:
      ValueError: there is no such chip, or no such slice of it.
      ImportError: its compiler is not installed; the message has the command.
      UnsupportedError: jax is older than 0.10.

    >>> topology("v5:4x4")
    Traceback (most recent call last):
    ...
    ValueError: there is no machine 'v5:4x4':
      * 'v5' is none of a100, b200, h100, h200, l4, v4, v5e, v5p, v6e, v7x
    Because the compiler has to know the chip.
    Did you mean v5e?
    """
    word, shape = _taken_apart(name)
    chip = CHIPS.get(word)
    if chip is None:
        raise refusal(
            ValueError,
            what=f"there is no machine {name!r}",
            which=[f"{word!r} is none of {', '.join(sorted(CHIPS))}"],
            why="the compiler has to know the chip",
            do=_usage.hint(word, CHIPS, "Take the one that is nearest to it."),
        )
    if not _compat.CAN_REWRITE:
        raise refusal(
            UnsupportedError,
            what="jax_dist.topology needs jax 0.10 or newer",
            which=[f"jax is {jax.__version__}"],
            why="compilers without their hardware were tried with that",
            do="Upgrade jax.",
        )
    if isinstance(chip, GpuChip):
        counts = _gpus(name, chip, shape)
        return _made(f"{chip.name}:{counts[0]}x{counts[1]}", chip, counts)
    grid = chip.shape_of(shape) if shape else None
    if grid is None:
        raise refusal(
            ValueError,
            what=f"{name!r} is no slice of TPUs",
            which=[f"{chip.name} is a grid of {chip.dimensions} dimensions, of {chip.largest} "
                   "chips at most"],
            why="a slice is named by its chip and its grid; its hosts follow from that",
            do=f"Give one such as {chip.usual}.",
        )  # fmt: skip
    return _made(f"{chip.name}:{'x'.join(map(str, grid))}", chip, grid)


def _taken_apart(name: str) -> tuple[str, str]:
    """
    >>> _taken_apart("V5E-16"), _taken_apart("h100")
    (('v5e', '16'), ('h100', ''))
    >>> _taken_apart("v5litepod-16")
    ('v5e', '16')
    """
    word, _, shape = name.lower().replace("-", ":").partition(":")
    return _CLOUD_NAMES.get(word, word), shape


_CLOUD_NAMES = {"v5litepod": "v5e"}  # as Google Cloud has it


def _gpus(name: str, chip: GpuChip, shape: str) -> tuple[int, int]:
    """Hosts, and the GPUs of each."""
    parts = shape.split("x") if shape else ["8"]
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise refusal(
            ValueError,
            what=f"{name!r} is no group of GPUs",
            which=[f"{shape!r} says neither how many there are, nor on how many hosts"],
            why="it is so many hosts, with so many GPUs each",
            do=f"Give {chip.name}:8, or {chip.name}:2x8 for two hosts of 8.",
        )
    hosts, devices = parts if len(parts) == 2 else ("1", *parts)
    return int(hosts), int(devices)


@functools.cache
def _made(name: str, chip: Chip, shape: tuple[int, ...]) -> Topology:
    """The same devices each time, so that programs for them are found again."""
    from jax.experimental import topologies  # noqa: PLC0415  # loads parts of JAX that few need

    _check_installed(name, chip)
    asked: dict[str, Any]
    if isinstance(chip, TpuChip):
        grid = "x".join(map(str, shape))
        asked = {"platform": "tpu", "topology_name": f"{chip.external_name or chip.name}:{grid}"}
        if chip.config:
            asked["chip_config_name"] = chip.config
        if all(size == 1 for size in shape):  # a host of one chip, and not of four
            asked["chips_per_host_bounds"] = (1, 1, 1)
    else:
        grid = "x".join(map(str, (1, *shape)))  # of one slice
        asked = {"platform": "cuda", "topology_name": "", "topology": grid}
        asked["target_config"] = chip.target
    try:
        with _without_hardware(), _silence():
            found = topologies.get_topology_desc(**asked)
    except NotImplementedError as error:
        raise refusal(
            UnsupportedError,
            what=f"the compiler for {name} was not loaded",
            which=[f"JAX looked for GPUs before, and found none: {error}"],
            why="JAX then puts its CUDA plugin aside, for as long as the process lives",
            do="Start Python with JAX_PLATFORMS=cpu, or call jax_dist.topology before anything "
            "asks for devices.",
        ) from error
    except jax.errors.JaxRuntimeError as error:
        usual = f" such as {chip.usual}" if isinstance(chip, TpuChip) else ""
        raise refusal(
            ValueError,
            what=f"the compiler knows no machine {name!r}",
            which=[text_of(error).splitlines()[0]],
            why="not every grid of chips is a slice",
            do=f"Give another one{usual}.",
        ) from error
    return Topology(name, tuple(found.devices), chip.memory)


def _check_installed(name: str, chip: Chip) -> None:
    """Raises ImportError where the compiler for a chip is not here."""
    extra, modules = "cuda12", ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if isinstance(chip, TpuChip):
        extra, modules = "tpu", ("libtpu",)
    if any(importlib.util.find_spec(module) for module in modules):
        return
    package = f"jax[{extra}]=={jax.__version__}"
    raise refusal(
        ImportError,
        what=f"the compiler for {name} is not installed",
        which=[f"there is no module {' or '.join(modules)}"],
        why="it compiles without the hardware, and comes in a package of its own",
        do=f"Run: {sys.executable} -m pip install '{package}'",
    )


@contextlib.contextmanager
def _without_hardware() -> Iterator[None]:
    """Compilers that are loaded inside do not look for a machine of theirs."""
    told = {
        "TPU_SKIP_MDS_QUERY": "1",  # libtpu asks Google's cloud what it runs on, and waits
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu locks the TPU, of which there is none
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # JAX refuses its CUDA plugin without a GPU
    }
    told = {name: value for name, value in told.items() if name not in os.environ}
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drops what is written to the standard error by others than Python.

    libtpu warns there, as it starts, of the TPU that it does not find.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as nowhere:
        before = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
