"""`python -m fastserve_hpc` is the same program as the `fastserve-hpc` console script."""

from fastserve_hpc.cli import main

if __name__ == "__main__":
    main()
