"""Data sets that lie in a directory; one of them can be fetched, by name and digest."""
