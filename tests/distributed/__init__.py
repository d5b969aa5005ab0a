"""Two processes of a gloo group, compared with one process that sees the whole batch."""
