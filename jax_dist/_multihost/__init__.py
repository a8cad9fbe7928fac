"""Parts of `jax_dist.multihost`."""
