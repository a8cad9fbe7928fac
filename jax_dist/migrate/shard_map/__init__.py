"""The target `shard_map`: `jax.jit(jax.shard_map(...))` over one mesh, without the device axis.

- mappings: the mapped functions of a file, with all their calls
- values, expressions: which variables, fields and results hold one value
- layouts: whether such a value is whole on each device, rows of a batch, or stacked slices
- plan: meshes, specs, and which steps can be `jax.jit` alone (global_steps)
- steps, placements, text: what is written for the functions and for their values
"""
