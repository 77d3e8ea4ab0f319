"""Checkpoints on disk: their files, digests and folder. Torch is not needed to read or write any of it."""
