"""The suites tunery brings, as YAML: see :mod:`..suite`."""
