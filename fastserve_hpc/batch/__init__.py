"""Batch files: reads requests, runs them on a server, writes results as they finish."""
