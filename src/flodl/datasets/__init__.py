"""Data sets that a directory holds, read without downloading anything."""
