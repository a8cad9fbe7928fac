"""Machines that are not here: their devices, and what a step needs on them.

`topologies` gives the devices of a TPU slice or of GPU hosts, for which the compilers work without
the hardware. `chips` holds what is public of each chip.
"""
