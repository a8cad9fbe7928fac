"""What a file means, as far as its text shows it.

In comes bytes; out comes a `Module`: the tree, what its names mean here and in the other files of
the project, and on top of it what a rule would ask: pmaps, traced functions, stacked values.
What is not certain is answered with None or an UNKNOWN origin, never with a guess. Findings, edits
and the place of new imports are here too, since rules and the codemod write them alike.
"""
