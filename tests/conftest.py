"""Set before any test module is imported: one OpenMP thread per process, because ranks share the cores."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples are the same in every run, and a slow machine is no failure.
settings.register_profile("flodl", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("flodl")
