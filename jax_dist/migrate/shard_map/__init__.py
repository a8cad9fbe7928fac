"""The target `shard_map`: `jax.jit(jax.shard_map(...))` over one mesh, without the device axis.

- mappings: the mapped functions of a file, with all their calls
- variables, flow, split_iterators: which names, fields and results hold the same arrays
- layouts: whether such arrays are replicated, sharded, or stacked along the device axis
- plan: meshes, specs, and which functions can be `jax.jit` alone (global_steps)
- function_writer, placements, text: what is written for the functions and for their arrays
"""
