"""The engine `workers`: clients in parallel processes on a CPU."""
