"""Shows findings, in each form in which somebody wants them.

In come findings, and a `RenderContext`: the pages of the rules, and the files as they were checked.
Out come texts: a report for people or programs (`report`), SARIF for code scanning (`sarif`), the
pages of the rules as Markdown (`markdown`). What is slow to load
is loaded when it is asked for. Nothing here looks for findings, leaves one out, or writes a file.
"""
