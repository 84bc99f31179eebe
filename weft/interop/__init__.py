"""Other people's formats, in and out: one file a family."""
