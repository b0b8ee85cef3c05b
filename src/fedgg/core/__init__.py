"""What a round is: rows, the algorithm interface, the reference step, the server's half. No code for speed."""
