"""Settings, linting, fixes and reports."""
