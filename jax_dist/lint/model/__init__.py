"""Static analysis of one file: its syntax tree, and what its names mean.

From bytes it makes a `Module`: the tree, what its names mean here and in the other files of the
project, and on top of it what a rule asks for: pmaps, traced functions, values with a leading
dimension over devices. What is not certain is answered with None or [], never with a guess.
"""
