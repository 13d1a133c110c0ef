"""Decoder-only models made of our modules, and the functions that load them."""
