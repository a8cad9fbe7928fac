"""Every name that differs between JAX versions, and the few private symbols, with their reasons.

Nothing outside of this folder imports from `jax._src`. Each symbol is guarded, and names the
versions of jax that it was seen in.
"""

from jax_dist._compat.arrays import auto_mesh, can_rewrap, movable, put_slices, rewrap
from jax_dist._compat.cache import (
    CacheWatcher,
    CompiledProgram,
    custom_call_targets,
    refuses_host_callbacks,
    reset_cache,
    say_unwritten,
    watch_cache,
)
from jax_dist._compat.calls import (
    PMAP_MODULE,
    CallWatcher,
    JitCall,
    calls_under_way,
    hide_frames,
    is_tracing,
    watch_calls,
)
from jax_dist._compat.compiles import (
    CompileRequest,
    CompileWatcher,
    cache_key,
    compile_request,
    compiles_watched,
    describe_arguments,
    flags_outside_key,
)
from jax_dist._compat.fronts import Answer, can_remember, front, run_jit
from jax_dist._compat.jaxprs import (
    ScanLayout,
    call_of,
    has_side_effects,
    is_dropped,
    is_unreduced,
    newly_manual_axes,
    scan_layout,
    to_varying,
    varying_axes,
)
from jax_dist._compat.jits import JitOptions, inside_jit, jit_like, jit_options, traced_types
from jax_dist._compat.pmaps import TakenPmap, pmaps_taken_over
from jax_dist._compat.processes import (
    Joined,
    backend_started,
    coordination_client,
    detect_cluster,
    initialize_options,
    joined_as,
    leave_coordination,
)
from jax_dist._compat.settings import config_value, option_names
from jax_dist._compat.versions import (
    CACHES_HOST_CALLBACKS,
    CAN_REWRITE,
    CPU_HANGS_WHEN_FULL,
    NESTED_MANUAL_AXIS_INDEX,
    PROCESSES_KEEP_WEAK_TYPES,
)

__all__ = [
    "Answer",
    "CACHES_HOST_CALLBACKS",
    "CAN_REWRITE",
    "CPU_HANGS_WHEN_FULL",
    "CacheWatcher",
    "CallWatcher",
    "CompileRequest",
    "CompileWatcher",
    "CompiledProgram",
    "JitCall",
    "JitOptions",
    "Joined",
    "NESTED_MANUAL_AXIS_INDEX",
    "PMAP_MODULE",
    "PROCESSES_KEEP_WEAK_TYPES",
    "ScanLayout",
    "TakenPmap",
    "auto_mesh",
    "backend_started",
    "cache_key",
    "call_of",
    "calls_under_way",
    "can_remember",
    "can_rewrap",
    "compile_request",
    "compiles_watched",
    "config_value",
    "coordination_client",
    "custom_call_targets",
    "describe_arguments",
    "detect_cluster",
    "flags_outside_key",
    "front",
    "has_side_effects",
    "hide_frames",
    "initialize_options",
    "inside_jit",
    "is_dropped",
    "is_tracing",
    "is_unreduced",
    "jit_like",
    "jit_options",
    "joined_as",
    "leave_coordination",
    "movable",
    "newly_manual_axes",
    "option_names",
    "pmaps_taken_over",
    "put_slices",
    "refuses_host_callbacks",
    "reset_cache",
    "rewrap",
    "run_jit",
    "say_unwritten",
    "scan_layout",
    "to_varying",
    "traced_types",
    "varying_axes",
    "watch_cache",
    "watch_calls",
]
