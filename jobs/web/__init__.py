"""The pages: views that read rows, call services, and render templates. Never talk to Slurm."""
