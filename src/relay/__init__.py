"""Relay: disaggregated, fault-tolerant LLM serving with bit-identical output on every path."""

__version__ = "0.1.0"
