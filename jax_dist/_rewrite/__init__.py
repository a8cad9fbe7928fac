"""Passes over one traced program: what it captures, gathers and partitions.

In comes a closed jaxpr. Out comes a `PassPlan`: what was found, by line, and the changed jaxpr, of
the same inputs and results; None where nothing changes.

`interpreter` reads and builds jaxprs, and all passes go through it; `uniformity` tells which values
all devices share. An equation that no rule covers stays as it is, with the reason in a finding. A
pass never drops an equation, changes a type, or assumes what it cannot see in the jaxpr.
"""
