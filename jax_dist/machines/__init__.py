"""Machines that are not here: their devices, and what a step needs on them.

`topologies` gives the devices of a TPU slice or of GPU hosts, for which the compilers work without
the hardware; `chips` holds what is public of each chip. `plans` takes a mapped step apart
(`steps`), compiles it in several `ways` for each machine, and gives a `report`: as data, as text by
`rendering`, and as a `picture`. `cost` reads memory and collectives from a compiled program.

Nothing here runs a program, and no number is a guess of ours: all are the compiler's.
"""
