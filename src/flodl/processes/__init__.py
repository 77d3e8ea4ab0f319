"""The launcher's side of a run: it starts ranks, listens, does what the controller decides, cleans up. No torch."""
