"""Modules over kernels: what models are made of."""
