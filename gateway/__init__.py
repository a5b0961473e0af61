"""Ivy, the gateway: text into token ids, vectors into bytes."""
