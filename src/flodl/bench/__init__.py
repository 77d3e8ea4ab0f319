"""Benchmarks: figures as ratios to a bound or to an alternative measured in the same run."""
