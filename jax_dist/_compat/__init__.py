"""Every name that differs between JAX versions, and the few private symbols, with their reasons.

Nothing outside of this folder imports from `jax._src`. Each symbol is guarded, and names the
versions of jax that it was seen in.
"""

from jax_dist._compat.cache import CacheWatcher as CacheWatcher
from jax_dist._compat.cache import describe_arguments as describe_arguments
from jax_dist._compat.cache import reset_cache as reset_cache
from jax_dist._compat.cache import watch_cache as watch_cache
from jax_dist._compat.cache import watch_cache_keys as watch_cache_keys
from jax_dist._compat.fronts import Answer as Answer
from jax_dist._compat.fronts import JitOptions as JitOptions
from jax_dist._compat.fronts import front as front
from jax_dist._compat.fronts import inside_jit as inside_jit
from jax_dist._compat.fronts import jit_like as jit_like
from jax_dist._compat.fronts import run_jit as run_jit
from jax_dist._compat.parameters import call_of as call_of
from jax_dist._compat.parameters import expanded as expanded
from jax_dist._compat.parameters import has_own_keys as has_own_keys
from jax_dist._compat.parameters import has_side_effects as has_side_effects
from jax_dist._compat.parameters import is_of_jax as is_of_jax
from jax_dist._compat.parameters import is_ref as is_ref
from jax_dist._compat.parameters import jit_operand_params as jit_operand_params
from jax_dist._compat.parameters import name_of as name_of
from jax_dist._compat.parameters import newly_manual_axes as newly_manual_axes
from jax_dist._compat.parameters import primitives_of_jax as primitives_of_jax
from jax_dist._compat.parameters import scan_layout as scan_layout
from jax_dist._compat.parameters import scan_with_constants as scan_with_constants
from jax_dist._compat.parameters import to_varying as to_varying
from jax_dist._compat.parameters import varying_axes as varying_axes
from jax_dist._compat.private import CACHES_HOST_CALLBACKS as CACHES_HOST_CALLBACKS
from jax_dist._compat.private import CAN_REWRITE as CAN_REWRITE
from jax_dist._compat.private import CPU_HANGS_WHEN_FULL as CPU_HANGS_WHEN_FULL
from jax_dist._compat.private import auto_mesh as auto_mesh
from jax_dist._compat.private import config_value as config_value
from jax_dist._compat.private import hide_frames as hide_frames
from jax_dist._compat.private import is_compile_only as is_compile_only
from jax_dist._compat.private import laid_by_rows as laid_by_rows
from jax_dist._compat.private import typed_collectives as typed_collectives
from jax_dist._compat.processes import TakenPmap as TakenPmap
from jax_dist._compat.processes import backend_started as backend_started
from jax_dist._compat.processes import coordination_client as coordination_client
from jax_dist._compat.processes import detect_cluster as detect_cluster
from jax_dist._compat.processes import joined_as as joined_as
from jax_dist._compat.processes import pmaps_taken_over as pmaps_taken_over
from jax_dist._compat.processes import put_slices as put_slices
from jax_dist._compat.processes import rewrap as rewrap
