"""Planning: integers in, integers out, the same on every rank."""
