"""What editors and type checkers see of the package, which loads its names on first use."""

from jax_dist import cache as cache
from jax_dist import errors as errors
from jax_dist import multihost as multihost
from jax_dist import testing as testing
from jax_dist._pmap.placement import device_put_replicated as device_put_replicated
from jax_dist._pmap.placement import device_put_sharded as device_put_sharded
from jax_dist._pmap.placement import replicate as replicate
from jax_dist._pmap.placement import shard as shard
from jax_dist._pmap.placement import unreplicate as unreplicate
from jax_dist.errors import CapturedArrayWarning as CapturedArrayWarning
from jax_dist.errors import DonationError as DonationError
from jax_dist.errors import MemoryGrowthError as MemoryGrowthError
from jax_dist.errors import RecompileError as RecompileError
from jax_dist.errors import TransferError as TransferError
from jax_dist.filter_pmap import filter_pmap as filter_pmap
from jax_dist.global_view.view import global_view as global_view
from jax_dist.memory import memory_guard as memory_guard
from jax_dist.nnx_pmap import nnx_pmap as nnx_pmap
from jax_dist.plan import plan as plan
from jax_dist.pmap import pmap as pmap
from jax_dist.rewrite import explain as explain
from jax_dist.rewrite import rewrite as rewrite
from jax_dist.strict import allow_recompiles as allow_recompiles
from jax_dist.strict import allow_transfers as allow_transfers
from jax_dist.strict import strict as strict
from jax_dist.topology import topology as topology

__version__: str
