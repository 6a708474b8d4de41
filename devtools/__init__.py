"""Programs for development and trial: the embedded Slurm cluster and the benchmarks.

Nothing of the application imports them. `scripts/cluster` and `scripts/bench` are their entry points.
"""
