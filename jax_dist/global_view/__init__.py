"""A step that was written for pmap, on global arrays, its state in parts if shardings say so.

A function of one device comes in, and a call; results go out, the state as it is kept. The step is
traced for one slice; what is shared on all devices is found in it (`uniformity`), its equations are
put into stages (`islands`), and run on global arrays, with a `shard_map` for what varies
(`emission`). `programs` keeps one jit object for each signature.

What is not cut has the bits of pmap. A leaf that varies is never cut, and never taken for shared.
"""
