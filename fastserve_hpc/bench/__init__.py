"""Load on a running server after a trace of lengths and times, and what it did to latencies."""
