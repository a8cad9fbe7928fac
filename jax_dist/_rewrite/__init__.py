"""Passes over one traced program: what it captures, gathers, partitions and draws.

In comes a closed jaxpr. Out comes a `PassPlan`: what was found, by line, and a function that
evaluates the changed program on the same inputs; None where nothing changes. A plan is made in
Python alone, and the program is emitted once, while JAX traces.

`interpreter` evaluates jaxprs, and all passes go through it; `uniformity` tells which values all
devices share. An equation that no rule covers stays as it is, with the reason in a finding. A pass
never drops an equation, changes a type, or assumes what it cannot see in the jaxpr.
"""
