"""What was attended to, as a person sees it: views read observe's records and plain arrays, and nothing else."""
