"""What a run leaves to read: one JSON object per line, written while it trains, readable after a kill at any byte."""
