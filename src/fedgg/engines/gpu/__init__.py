"""The engines for a GPU: `stacked` and `streams`, and the captured steps both replay."""
