"""The checker: finds what pmap-era code does in source text, without importing JAX."""
