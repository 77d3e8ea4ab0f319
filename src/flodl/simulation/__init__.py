"""Virtual time: the machines of `protocol` driven by a seeded world instead of processes."""
