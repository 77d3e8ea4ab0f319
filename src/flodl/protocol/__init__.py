"""Sans-I/O machines: what is said between rank and controller, and every decision of a run.

Nothing in this room opens a socket, reads a clock, draws a random number or imports torch.
"""
