"""Ragged attention: one Protocol, one file a backend, and a measured table that chooses."""
