"""Evaluation: scores that others can reproduce, with their signatures."""
