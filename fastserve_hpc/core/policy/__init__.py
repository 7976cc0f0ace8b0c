"""Policies order requests; they know nothing of memory or batches."""
