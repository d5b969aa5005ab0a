"""Show: what was captured, decided and rewritten, as data, as tables and as a graph of regions."""
