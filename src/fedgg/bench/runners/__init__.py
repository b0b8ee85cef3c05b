"""Programs of the contenders that need only fedgg and torch."""
