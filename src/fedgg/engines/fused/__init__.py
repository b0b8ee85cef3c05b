"""The fused step: an algorithm's terms, momentum, weight decay and update in one pass over memory.

Used where a step is a sum of terms (`Algorithm.terms`). `terms` analyses which vectors and inner products an algorithm
needs, `tracing` records how its coefficients are computed from them, `cpu` and `gpu` take the step; `net` runs single
rows with fused `pooling` and measures Fisher information from `per_example_gradients`; `engine` is the engine `fused`.
"""
