"""Several processes on one machine, started, watched and ended together. Nothing imports JAX."""
