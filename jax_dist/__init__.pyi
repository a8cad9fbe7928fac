from . import cache as cache
from . import errors as errors
from . import multihost as multihost
from . import testing as testing
from ._pmap.placement import device_put_replicated as device_put_replicated
from ._pmap.placement import device_put_sharded as device_put_sharded
from ._pmap.placement import replicate as replicate
from ._pmap.placement import shard as shard
from ._pmap.placement import unreplicate as unreplicate
from .errors import CapturedArrayWarning as CapturedArrayWarning
from .errors import DonationError as DonationError
from .errors import MemoryGrowthError as MemoryGrowthError
from .errors import RecompileError as RecompileError
from .errors import TransferError as TransferError
from .filter_pmap import filter_pmap as filter_pmap
from .global_view.view import global_view as global_view
from .memory import memory_guard as memory_guard
from .nnx_pmap import nnx_pmap as nnx_pmap
from .plan import plan as plan
from .pmap import pmap as pmap
from .rewrite import explain as explain
from .rewrite import rewrite as rewrite
from .strict import allow_recompiles as allow_recompiles
from .strict import allow_transfers as allow_transfers
from .strict import strict as strict
from .topology import topology as topology

__version__: str
