"""The devices of machines that are not attached, to compile programs for.

JAX compiles for them by `jax.experimental.topologies`, without the hardware. The memory of a TPU
device is what its compiler allows a program (libtpu 0.0.41; it says so where one does not fit). Of
a GPU, JAX takes three quarters at its start, which `XLA_PYTHON_CLIENT_MEM_FRACTION` changes. The
other numbers of a GPU are public figures: by them the compiler decides how to cut its loops.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax

from jax_dist import _usage
from jax_dist._compat import Device

_GIB = 2**30
_FRACTION = 0.75  # of the memory of a GPU


@dataclasses.dataclass(frozen=True, slots=True)
class TpuChip:
    """A TPU, whose slices are grids of chips."""

    name: str  # as users write it
    dimensions: int  # of the grid
    largest: int  # slice, in chips
    memory: int  # bytes of one device that a program may use
    external_name: str = ""  # libtpu's, where that is another one
    config: str = ""  # that is not libtpu's default

    def shape_of(self, text: str) -> tuple[int, ...] | None:
        """The grid: "4x4", or for flat ones the number of its chips, "16"; None for anything else.

        >>> TPUS["v5e"].shape_of("4x4"), TPUS["v5e"].shape_of("16"), TPUS["v5e"].shape_of("5")
        ((4, 4), (4, 4), None)
        """
        parts = text.split("x")
        if not all(part.isdecimal() and int(part) for part in parts):
            return None
        shape = tuple(map(int, parts))
        if self.dimensions == 2 and len(shape) == 1:
            return _GRIDS.get(shape[0])
        if len(shape) == self.dimensions - 1 == 2:  # one layer
            shape = (*shape, 1)
        fits = len(shape) == self.dimensions and math.prod(shape) <= self.largest
        return shape if fits else None

    @property
    def usual(self) -> str:
        """Some slices, as examples."""
        shapes = ("2x2", "4x4", "16x16") if self.dimensions == 2 else ("2x2x1", "2x2x4", "4x4x4")
        return ", ".join(f"{self.name}:{shape}" for shape in shapes)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuChip:
    """An NVIDIA GPU."""

    name: str
    description: str
    capability: tuple[int, int]  # of CUDA
    cores: int  # streaming multiprocessors
    float_units: int  # for float32, of each
    threads: int  # at a time, on each
    shared_memory: int  # bytes, of each
    l2: int  # bytes
    bandwidth: int  # bytes per second
    clock: float  # GHz
    total_memory: int  # bytes

    @property
    def memory(self) -> int:
        """Bytes that a program may use."""
        return int(_FRACTION * self.total_memory)

    @property
    def target(self) -> str:
        """The description that XLA compiles for, as the text of its proto."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  shared_memory_per_core: {self.shared_memory}
  threads_per_core_limit: {self.threads}
  core_count: {self.cores}
  fpus_per_core: {self.float_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.total_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.description}"
"""


Chip: TypeAlias = TpuChip | GpuChip


def _gib(number: float) -> int:
    return round(number * _GIB)


# By the number of chips, as in v5e-16.
_GRIDS = {
    1: (1, 1),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
TPUS = {
    chip.name: chip
    for chip in (
        TpuChip("v4", 3, 4096, _gib(30.75), config="megacore"),
        TpuChip("v5e", 2, 256, _gib(15.75)),
        TpuChip("v5p", 3, 8960, _gib(95.74)),
        TpuChip("v6e", 2, 256, _gib(31.25)),
        TpuChip("v7x", 3, 9216, _gib(94.75), external_name="tpu7x"),  # two devices on each chip
    )
}
GPUS = {
    chip.name: chip
    for chip in (
        GpuChip(
            "a100", "A100 80GB", (8, 0), 108, 64, 2048, 167_936, 40 << 20, 2_039 * 10**9, 1.41,
            85_899_345_920,
        ),
        GpuChip(
            "b200", "B200", (10, 0), 148, 128, 2048, 233_472, 126 << 20, 8_000 * 10**9, 1.965,
            192_265_846_784,
        ),
        GpuChip(
            "h100", "H100 80GB", (9, 0), 132, 128, 2048, 233_472, 50 << 20, 3_352 * 10**9, 1.98,
            84_942_979_072,
        ),
        GpuChip(
            "h200", "H200", (9, 0), 132, 128, 2048, 233_472, 50 << 20, 4_800 * 10**9, 1.98,
            150_754_820_096,
        ),
        GpuChip(
            "l4", "L4", (8, 9), 58, 128, 1536, 102_400, 48 << 20, 300 * 10**9, 2.04,
            24_152_899_584,
        ),
    )
}  # fmt: skip
CHIPS: dict[str, Chip] = {**TPUS, **GPUS}


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """Devices that compile programs and run none, made by `jax_dist.topology`."""

    name: str  # as `topology` takes it: "v5e:4x4"
    devices: tuple[Device, ...]
    memory: int | None  # bytes of one device that a program may use; None if unknown

    @property
    def hosts(self) -> int:
        """Return how many processes a job on this machine has."""
        return len({device.process_index for device in self.devices})


def topology(name: str) -> Topology:
    """Return the devices of a machine that is not attached, to compile programs for.

    They go where devices go: `jax_dist.pmap(devices=...)`, a mesh, `jax_dist.explain`. Only
    `.lower(...)` and `.compile()` work on them; a call is an error.

    Args:
      name: a slice of TPUs, as "v5e:4x4", "v5p:2x2x4" or "v5e-16"; or GPUs: "h100" for a host of 8,
        "h100:4" for one of 4, "h100:2x8" for two hosts of 8.

    Raises:
      ValueError: there is no such chip, or no such slice of it.
      ImportError: its compiler is not installed; the message has the command.

    >>> topology("v5:4x4")
    Traceback (most recent call last):
    ...
    ValueError: 'v5:4x4' is not a known machine. Did you mean v5e?
    """
    word, _, shape = name.lower().replace("-", ":").partition(":")
    word = {"v5litepod": "v5e"}.get(word, word)  # as Google Cloud names it
    chip = CHIPS.get(word)
    if chip is None:
        known = f"The chips are {', '.join(sorted(CHIPS))}."
        raise ValueError(f"{name!r} is not a known machine. {_usage.hint(word, CHIPS, known)}")
    if isinstance(chip, TpuChip):
        sizes = chip.shape_of(shape) if shape else None
        remedy = f"a slice of {chip.largest} chips at most, such as {chip.usual}"
    else:
        parts = shape.split("x") if shape else ["8"]
        is_count = len(parts) <= 2 and all(part.isdecimal() and int(part) for part in parts)
        sizes = tuple(map(int, ["1", *parts][-2:])) if is_count else None  # hosts, GPUs of each
        remedy = f"{chip.name}:8, or {chip.name}:2x8 for two hosts of 8"
    if sizes is None:
        raise ValueError(f"{name!r} is not a machine of {chip.name}. Give {remedy}.")
    return _load(f"{chip.name}:{'x'.join(map(str, sizes))}", chip, sizes)


@functools.cache
def _load(name: str, chip: Chip, sizes: tuple[int, ...]) -> Topology:
    """Return the topology, the same devices each time: they are in the keys of JAX's caches."""
    from jax.experimental import topologies  # noqa: PLC0415  # loads parts of JAX that few need

    options: dict[str, Any]
    if isinstance(chip, TpuChip):
        extra, modules = "tpu", ("libtpu",)
        grid = "x".join(map(str, sizes))
        options = {"platform": "tpu", "topology_name": f"{chip.external_name or chip.name}:{grid}"}
        if chip.config:
            options["chip_config_name"] = chip.config
        if math.prod(sizes) == 1:  # a host of one chip, and not of four
            options["chips_per_host_bounds"] = (1, 1, 1)
    else:
        extra, modules = "cuda12", ("jax_cuda12_plugin", "jax_cuda13_plugin")
        grid = "x".join(map(str, (1, *sizes)))  # of one slice
        options = {"platform": "cuda", "topology_name": "", "topology": grid}
        options["target_config"] = chip.target
    if not any(importlib.util.find_spec(module) for module in modules):
        package = f"jax[{extra}]=={jax.__version__}"
        raise ImportError(
            f"The compiler for {name} is not installed: there is no module {' or '.join(modules)}. "
            f"Run: {sys.executable} -m pip install '{package}'"
        )
    try:
        with _without_hardware():
            description = topologies.get_topology_desc(**options)
    except NotImplementedError as error:
        # JAX has looked for GPUs before, found none, and put its CUDA plugin aside.
        raise NotImplementedError(
            f"The compiler for {name} was not loaded: {error}. Start Python with "
            "JAX_PLATFORMS=cpu, or call jax_dist.topology before anything asks for devices."
        ) from error
    except jax.errors.JaxRuntimeError as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"The compiler rejects the machine {name!r}: {line}") from error
    return Topology(name, tuple(description.devices), chip.memory)


@contextlib.contextmanager
def _without_hardware() -> Iterator[None]:
    """Keep compilers that are loaded inside from looking for hardware, and from warning of it."""
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",  # libtpu asks Google's cloud what it runs on, and waits
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu locks the TPU, of which there is none
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # JAX rejects its CUDA plugin without a GPU
    }
    settings = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(settings)
    sys.stderr.flush()
    saved = os.dup(2)  # libtpu writes there by itself
    try:
        with tempfile.TemporaryFile() as sink:
            os.dup2(sink.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        for name in settings:
            del os.environ[name]
