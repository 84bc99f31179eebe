"""Searches: how a model that gives the next token is made to give a sequence. They know token numbers only."""
