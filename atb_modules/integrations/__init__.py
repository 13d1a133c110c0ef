"""Doors into other libraries."""
