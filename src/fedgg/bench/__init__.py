"""fedgg's engines beside plain loops and other frameworks: the same work, in turns, in one go."""
