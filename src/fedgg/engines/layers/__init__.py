"""Layers with forward and backward passes of their own, and the modules that can be run by them."""
