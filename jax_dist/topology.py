"""The devices of machines that are not attached, to compile programs for.

JAX compiles for them by `jax.experimental.topologies`, without the hardware. The memory of a TPU
device is what its compiler allows a program (libtpu 0.0.41; it says so where one does not fit). Of
a GPU, JAX takes three quarters at its start, which `XLA_PYTHON_CLIENT_MEM_FRACTION` changes. The
other numbers of a GPU are public figures: by them the compiler decides how to cut its loops.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
import sys
from typing import Any, NamedTuple
from unittest import mock

import jax

from jax_dist import _usage
from jax_dist._compat import Device
from jax_dist.errors import ArgumentError


class TpuChip(NamedTuple):
    """A TPU generation, whose slices are 2D or 3D grids of chips."""

    dimensions: int  # of the grid: 2 or 3
    largest: int  # number of chips in the largest slice; libtpu compiles for larger ones, too
    memory: float  # GiB of one device that a program may use
    options: dict[str, str] = {}  # libtpu options, where they are not its defaults

    def parse(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the grid of a slice named by its sizes or count of chips; None if none fits."""
        if self.dimensions == 2 and len(sizes) == 1:
            # A count of chips: the squarest grid with a power of 2 as height (8 chips: 2x4).
            (chips,) = sizes
            rows = 2 ** ((chips.bit_length() - 1) // 2)
            if chips % rows != 0:
                return None
            sizes = (rows, chips // rows)
        elif self.dimensions == 3 and len(sizes) == 2:
            sizes = (*sizes, 1)
        is_slice = len(sizes) == self.dimensions and math.prod(sizes) <= self.largest
        return sizes if is_slice else None


class GpuChip(NamedTuple):
    """A model of NVIDIA GPU, with the figures that XLA compiles for."""

    description: str
    capability: tuple[int, int]  # CUDA compute capability: major, minor
    cores: int  # streaming multiprocessors
    float_units: int  # float32 units of each multiprocessor
    threads: int  # most concurrent threads on each multiprocessor
    shared_memory: int  # bytes of each multiprocessor
    l2: int  # MiB
    bandwidth: int  # GB per second
    clock: float  # GHz
    total_memory: int  # bytes

    @property
    def target(self) -> str:
        """Return XLA's `GpuTargetConfigProto` for this GPU, in protobuf text format."""
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
  memory_bandwidth: {self.bandwidth * 10**9}
  l2_cache_size: {self.l2 * 2**20}
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


TPUS = {
    "v4": TpuChip(3, 4096, 30.75, {"chip_config_name": "megacore"}),
    "v5e": TpuChip(2, 256, 15.75),
    "v5p": TpuChip(3, 8960, 95.74),
    "v6e": TpuChip(2, 256, 31.25),
    "v7x": TpuChip(3, 9216, 94.75),  # two devices on each chip
}
_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x"}  # the names in Google Cloud and in libtpu
GPUS = {
    "a100": GpuChip("A100 80GB", (8, 0), 108, 64, 2048, 167936, 40, 2039, 1.41, 85_899_345_920),
    "b200": GpuChip("B200", (10, 0), 148, 128, 2048, 233472, 126, 8000, 1.965, 192_265_846_784),
    "h100": GpuChip("H100 80GB", (9, 0), 132, 128, 2048, 233472, 50, 3352, 1.98, 84_942_979_072),
    "h200": GpuChip("H200", (9, 0), 132, 128, 2048, 233472, 50, 4800, 1.98, 150_754_820_096),
    "l4": GpuChip("L4", (8, 9), 58, 128, 1536, 102400, 48, 300, 2.04, 24_152_899_584),
}
# Environment variables for loading a compiler, which else waits for hardware and warns.
_WITHOUT_HARDWARE = {
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu asks Google's cloud what it runs on
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # and warns without it; any will do
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu locks the TPU
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # JAX rejects its CUDA plugin without a GPU
}


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """A machine to compile programs for: a TPU slice, or hosts with GPUs; see `topology`."""

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
      ArgumentError: there is no such chip, or no such slice of it; or JAX looked for GPUs before,
        and put their compiler aside: start with JAX_PLATFORMS=cpu.
      ImportError: its compiler is not installed; the message has the command.
    """
    chip, _, shape = name.lower().replace("-", ":").partition(":")
    chip = _ALIASES.get(chip, chip)
    if chip not in TPUS and chip not in GPUS:
        known = sorted((*TPUS, *GPUS))
        remedy = _usage.hint(chip, known, f"The chips are {', '.join(known)}.")
        raise ArgumentError(f"{name!r} is not a known machine. {remedy}")
    if chip in GPUS and not shape:
        shape = "8"
    is_shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape)
    sizes = tuple(int(size) for size in shape.split("x")) if is_shape else ()
    if chip in TPUS:
        grid = TPUS[chip].parse(sizes)
        example = f"{chip}:{'x'.join('4' * TPUS[chip].dimensions)}"
        remedy = f"a slice of {TPUS[chip].largest} chips at most, such as {example}"
    else:
        if len(sizes) == 1:  # one host
            sizes = (1, *sizes)
        grid = sizes if len(sizes) == 2 else None  # hosts, GPUs on each
        remedy = f"{chip}:8, or {chip}:2x8 for two hosts of 8"
    if grid is None:
        raise ArgumentError(f"{name!r} is not a machine of {chip}. Give {remedy}.")
    return _load(chip, grid)


@functools.cache
def _load(chip: str, grid: tuple[int, ...]) -> Topology:
    """Load the compiler for a TPU grid, or (hosts, GPUs on each), and return its topology.

    Cached, so that its devices, which are in the keys of JAX's caches, are the same each time.
    """
    from jax.experimental import topologies  # not at the top: few programs need these parts of JAX

    shape = "x".join(map(str, grid))
    name = f"{chip}:{shape}"
    options: dict[str, Any]
    if chip in TPUS:
        extra, modules = "tpu", ("libtpu",)
        options = {"platform": "tpu", "topology_name": name.replace("v7x", "tpu7x")}
        options |= TPUS[chip].options
        memory = TPUS[chip].memory * 2**30
        if math.prod(grid) == 1:  # by default, libtpu assumes hosts of four chips
            options["chips_per_host_bounds"] = (1, 1, 1)
    else:
        extra, modules = "cuda12", ("jax_cuda12_plugin", "jax_cuda13_plugin")
        options = {"platform": "cuda", "topology_name": "", "topology": f"1x{shape}"}  # one slice
        options["target_config"] = GPUS[chip].target
        memory = 0.75 * GPUS[chip].total_memory
    if not any(importlib.util.find_spec(module) for module in modules):
        package = f"jax[{extra}]=={jax.__version__}"
        raise ImportError(
            f"The compiler for {name} is not installed: there is no module {' or '.join(modules)}. "
            f"Run: {sys.executable} -m pip install '{package}'"
        )
    try:
        with mock.patch.dict(os.environ, {**_WITHOUT_HARDWARE, **os.environ}):
            description = topologies.get_topology_desc(**options)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        line = str(error).splitlines()[0]
        raise ArgumentError(f"The compiler rejects the machine {name!r}: {line}") from error
    return Topology(name, tuple(description.devices), round(memory))
