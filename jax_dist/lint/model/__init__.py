"""Static analysis of one file: its syntax tree, what its names mean here and in other files, pmaps,
traced functions, values with a leading dimension over devices. What is not certain is None or [].
"""
