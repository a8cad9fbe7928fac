"""The target `shard_map`: `jax.jit(jax.shard_map(...))` over one mesh, without the device axis.

- values: which variables, fields and results hold one value, by their definitions and reads
- layouts: whether such a value is whole on each device, rows of a batch, or stacked slices
- text: what is written then
"""
