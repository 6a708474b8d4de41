"""The pages: views that read rows, call actions and render templates. They never run Slurm commands."""
