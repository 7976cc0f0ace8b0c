"""The start-up doctor: finds what would go wrong later, before weights are loaded, and says what cures it.

`preflight` asks before MPI_Init whether the nodes answer; `run` does everything else after it:
every rank looks at itself (`probes`), tries its links (`links`), and tells rank 0 (`exchange`), which
judges all ranks together (`checks`). Everything has a time-out; nothing loads torch.
"""

from fastserve_hpc.doctor.finding import Finding, at_level
from fastserve_hpc.doctor.preflight import preflight
from fastserve_hpc.doctor.run import raise_errors, run

__all__ = ["Finding", "at_level", "preflight", "raise_errors", "run"]
