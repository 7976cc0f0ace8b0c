"""All kernel tests once more with a library that AddressSanitizer and UBSan watch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_under_sanitizers(builder: ModuleType, tmp_path: Path) -> None:
    try:
        compiler = builder.find_compiler()
        builder.build(tmp_path / "lib.so", flags=builder.SANITIZE_FLAGS)
    except builder.BuildError as error:
        pytest.skip(str(error))
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    env = {
        **os.environ,
        "FASTSERVE_KERNELS_LIBRARY": str(tmp_path / "lib.so"),
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "halt_on_error=1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    files = [
        str(path) for path in sorted(HERE.glob("test_*.py")) if path.name not in ("test_build.py", Path(__file__).name)
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE.parents[1], check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
