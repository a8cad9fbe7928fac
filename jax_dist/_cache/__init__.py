"""Parts of `jax_dist.cache`: directories, entries, failures; and recorded runs, compared."""
