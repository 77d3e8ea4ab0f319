"""What is in this box, and devices that are emulated on its processor."""
