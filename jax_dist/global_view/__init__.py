"""A step that was written for pmap, on global arrays, with a sharded state.

The step is traced for one slice (`traced_steps`), it is found which values are uniform
(`analysis`), its equations are planned (`regions`) and run on global arrays, with a `shard_map` for
what varies (`emission`). `programs` holds the jit objects of a view, by the types of arguments.
"""
