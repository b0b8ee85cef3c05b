"""`fedgg bench`: seconds per round of fedgg's engines, plain loops and other frameworks on the same workload."""
