"""A step that was written for pmap, on global arrays, with a sharded state.

A function of one device and a call come in; results go out, the state as it is kept. The step is
traced for one slice (`traced_steps`), it is found which values are uniform (`analysis`), its
equations are put into stages (`regions`) and run on global arrays, with a `shard_map` for what
varies (`emission`). `programs` holds the jit objects of a view, by the types of their arguments.
"""
