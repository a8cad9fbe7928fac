"""Move JAX code from `jax.pmap` to `jit(shard_map)`: the same numbers, on one machine or many.

The public names are those of `__init__.pyi`, each imported on first use: lint and migrate never
load jax. A function wins over the file of its name: `jax_dist.pmap` is that of `jax_dist/pmap.py`.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
