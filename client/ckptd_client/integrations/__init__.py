"""Adapters: one library each, imported only by who uses it."""
