"""One operation a file: the plain reference, the fast ways, and the rule that picks one."""
