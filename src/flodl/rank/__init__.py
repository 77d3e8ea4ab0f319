"""What one process trains: a rank of a run, or the whole run alone."""
