"""Parts of the test cluster, `slurm/testcluster`."""
