"""The fused step: an algorithm's terms, momentum, weight decay and update in one pass over memory.

Used if a step is a sum of terms (`Algorithm.terms`). `term_analysis` finds the vectors and inner products an algorithm
needs and traces its coefficients, `term_coefficients` turns the trace into a function, `cpu_step` and `gpu_step` take
the step. `net` has faster layers on a CPU (`conv_pool` fuses convolution, ReLU and max-pool) and computes the Fisher
information, `engine` is the engine `fused`.
"""
