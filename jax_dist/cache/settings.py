"""What stands beside the program in its key: versions, flags, devices, options of the compiler."""

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata, util
from typing import TypeAlias

import jax

from jax_dist import _compat
from jax_dist.cache.ledger import CALL, NOT_REGISTERED

Settings: TypeAlias = dict[str, str]  # by name, in words that can be shown

DEBUG_OPTION = "debug option "
COMPILER_OPTION = "compiler option "
DIRECTORY = "cache directory"
DEVICES = "devices"
ALL_DEVICES = "devices of all processes"
FLAGS = "XLA flags"
HASH_SEED = "PYTHONHASHSEED"
PROCESSES = "processes"
METADATA = "metadata in key"

# Custom calls that XLA resolves itself.
_OF_XLA = re.compile(r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_.*|xla\..*")
# Through jax 0.10.2 the cache's directory is also the place of these, and part of the key.
DIRECTORY_OPTIONS = ("xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_kernel_cache_file")


def settings_of(request: _compat.CompileRequest) -> Settings:
    """What can make the key of a request differ, without its program."""
    devices = request.devices.flatten().tolist()
    return {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "backend version": request.backend.platform_version,
        FLAGS: " ".join(_flags()),
        DEVICES: " ".join(str(device.id) for device in devices),
        "kinds of devices": ", ".join(dict.fromkeys(device.device_kind for device in devices)),
        ALL_DEVICES: str(request.backend.device_count()),
        PROCESSES: str(jax.process_count()),
        DIRECTORY: str(_compat.config_value("jax_compilation_cache_dir") or ""),
        METADATA: str(_compat.config_value("jax_compilation_cache_include_metadata_in_key")),
        "compression": "zlib" if util.find_spec("zstandard") is None else "zstandard",
        HASH_SEED: os.environ.get("PYTHONHASHSEED", "random"),
        **dict(_options(request.options)),
    }


def circumstances(program: _compat.CompiledProgram) -> Settings | None:
    """What a failure to compile depends on beside its key; None where that cannot be told.

    The versions and most flags are in the key too, but not each flag, and not which functions
    outside XLA are registered.
    """
    under = {
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "platform": f"{program.platform} {program.backend.platform_version}",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }
    calls = [name for name in sorted(program.custom_calls()) if not _OF_XLA.fullmatch(name)]
    if not calls:
        return under
    registered = _compat.custom_call_targets(program.platform)
    if registered is None:
        return None
    for name in calls:
        under[CALL + name] = "registered" if name in registered else NOT_REGISTERED
    return under


def _flags() -> Iterator[str]:
    """As JAX gathers them, from two variables and the command line, less those that only dump."""
    said = [
        *os.environ.get("XLA_FLAGS", "").split(),
        *os.environ.get("LIBTPU_INIT_ARGS", "").split(),
    ]
    said += [argument for argument in sys.argv if argument.startswith("--xla")]
    outside = _compat.flags_outside_key()
    return (flag for flag in sorted(said) if flag.split("=")[0] not in outside)


def _options(options: object) -> Iterator[tuple[str, str]]:
    build = options.executable_build_options  # pyright: ignore[reportAttributeAccessIssue]
    outside = _compat.flags_outside_key()
    for name in dir(build.debug_options):
        if name.startswith("xla") and f"--{name}" not in outside or name in DIRECTORY_OPTIONS:
            yield DEBUG_OPTION + name, str(getattr(build.debug_options, name))
    for name, value in options.env_option_overrides:  # pyright: ignore[reportAttributeAccessIssue]
        if f"--{name}" not in outside:
            yield COMPILER_OPTION + name, str(value)
