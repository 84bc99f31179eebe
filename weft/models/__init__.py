"""Models: one file a family, read top to bottom; thin over layers. They know tensors, no text."""
