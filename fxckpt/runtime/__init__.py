"""Runtime: the transfer operators, and plain execution of rewritten graphs."""
