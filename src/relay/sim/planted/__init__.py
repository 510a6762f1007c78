"""Planted bugs, by the core they are in."""
