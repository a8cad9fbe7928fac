"""Does a function compute the same on any number of devices?

A function and its arguments come in; a report goes out, as data, text and a table: a verdict for
each result, and for each that differs the line where it went wrong, why, and what to do.

The program for each number of devices is traced, and evaluated on one device. The tolerance is
never fixed: it comes from running the program again with the rounding of every equation moved.
Nothing here may report a difference that rounding explains, or change the program of the user.
"""
