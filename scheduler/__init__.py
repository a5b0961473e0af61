"""Tulip: decides which sequences go to the engine next, and brings their vectors back."""
