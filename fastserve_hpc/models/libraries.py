"""What serving needs and the client's install lacks, named before anything imports it."""

from __future__ import annotations

import importlib.util

from fastserve_hpc.errors import ConfigError

NEEDED = ("torch", "numpy", "tokenizers", "safetensors", "gguf", "jinja2")
"""Import names of what reads and computes any model."""


def check_libraries() -> None:
    """Raise `ConfigError` naming what is not installed. Nothing is imported."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a server needs {', '.join(missing)}, which this installation lacks: the plain install is the client "
            "alone; pip install 'fastserve-hpc[serve,mpich]', or '.[serve,mpich]' in the repository"
        )
