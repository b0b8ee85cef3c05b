"""The contenders that need nothing but fedgg and torch, each a process of its own."""
