"""Directed scenarios: public incidents, played over the same world with the same checkers."""
