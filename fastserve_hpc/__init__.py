"""FastServe-HPC: an LLM server for HPC clusters, for live clients and batch files at the same time."""

__version__ = "0.1.0"
