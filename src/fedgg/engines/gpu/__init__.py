"""The engines for a GPU, `stacked` and `streams`, and the CUDA graphs they replay."""
