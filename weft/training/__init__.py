"""Training: one loop for every model, checkpoints that resume exactly, optimisers and progress."""
