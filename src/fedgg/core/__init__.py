"""What a round is: rows, the one algorithm interface, the one training loop."""
