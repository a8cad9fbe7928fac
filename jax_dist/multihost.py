"""Jobs of several processes: join them, compare what they do, and end them together.

`initialize` calls `jax.distributed.initialize`; everything here uses JAX's own coordination
service.
"""

from jax_dist._multihost.agreement import agree
from jax_dist._multihost.initialization import initialize
from jax_dist._multihost.preemption import preempted
from jax_dist._multihost.watchdog import watchdog

__all__ = ("agree", "initialize", "preempted", "watchdog")
