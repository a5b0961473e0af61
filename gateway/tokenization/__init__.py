"""Text into token ids, behind one interface."""
