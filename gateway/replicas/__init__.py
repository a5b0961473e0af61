"""Engines elsewhere: other servers, and processes of our own, behind one balancer."""
