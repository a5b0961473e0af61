"""Layers that several models share."""
