"""Layers with hand-written forward and backward passes, and programs of them that replace modules."""
