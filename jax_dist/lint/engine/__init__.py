"""Settings, linting, suppressions, fixes and reports.

A fix is not made if the new text would not parse, or would have new findings.
"""
