"""A trie of byte strings as one double array: a step is an addition, a load and a comparison.

A node is four int32 in one 16-byte line: base, parent, id and a gap. The child of node n by byte c is node
base[n] + c, if its parent is n. id is -1 where no key ends. Node 0 is the root.
Source: Aoe 1989, "An efficient digital search algorithm by using a double-array structure".
"""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import Bytes, Int64, UInt8, signed
from gateway.tokenization.kernels.jit import entry, inner
from rose.batch import Int32

NODE = 4


def build_trie(ids: dict[bytes, int]) -> Int32:
    """i32[4 n] of the keys' trie. The empty key is left out."""
    keys = sorted(key for key in ids if key)
    bounds = np.zeros(len(keys) + 1, np.int64)
    np.cumsum([len(key) for key in keys], out=bounds[1:])
    values = np.array([ids[key] for key in keys], np.int32)
    text: Bytes = np.frombuffer(b"".join(keys) or b"\0", np.uint8)
    nodes: Int32 = _build(text, bounds, values)
    return nodes


@inner
def _grown(nodes: Int32, size: int) -> Int32:
    larger = np.empty(size, np.int32)
    kept = min(len(nodes), size)
    for at in range(kept):
        larger[at] = nodes[at]
    for at in range(kept, size):
        larger[at] = -1
    return larger


@entry
def _build(text: Bytes, bounds: Int64, values: Int32) -> Int32:
    """The double array of sorted, distinct keys, widest nodes of a level first come first placed."""
    nodes = _grown(np.empty(0, np.int32), NODE * 4096)
    num_keys = len(bounds) - 1
    # Nodes whose children are still to be placed: node, first key, end of keys, depth.
    waiting = np.empty((len(text) + 2, 4), np.int64)
    waiting[0, 0], waiting[0, 1], waiting[0, 2], waiting[0, 3] = 0, 0, num_keys, 0
    head, tail = 0, 1
    children = np.empty(256, np.int64)
    starts = np.empty(257, np.int64)
    free = 1
    while head < tail:
        node, low, high, depth = waiting[head, 0], waiting[head, 1], waiting[head, 2], waiting[head, 3]
        head += 1
        if low < high and bounds[low + 1] - bounds[low] == depth:
            nodes[NODE * node + 2] = values[low]
            low += 1
        if low == high:
            continue
        count = 0
        last = -1
        for key in range(low, high):
            byte = signed(text[bounds[key] + depth])
            if byte != last:
                children[count], starts[count], last = byte, key, byte
                count += 1
        starts[count] = high
        while NODE * free < len(nodes) and nodes[NODE * free + 1] >= 0:
            free += 1
        slot, misses = free, 0
        while True:
            base = slot - children[0]
            if NODE * (slot + 256) >= len(nodes):
                nodes = _grown(nodes, 2 * len(nodes))
            fits = base > 0 and nodes[NODE * slot + 1] < 0
            if fits:
                for index in range(1, count):
                    if nodes[NODE * (base + children[index]) + 1] >= 0:
                        fits = False
                        break
            if fits:
                break
            slot += 1
            misses += 1
        if misses > 512:  # a crowded stretch: later nodes do not try it again
            free += (slot - free) // 2
        nodes[NODE * node] = base
        for index in range(count):
            child = base + children[index]
            nodes[NODE * child + 1] = node
            waiting[tail, 0], waiting[tail, 1] = child, starts[index]
            waiting[tail, 2], waiting[tail, 3] = starts[index + 1], depth + 1
            tail += 1
    top = len(nodes) // NODE - 1
    while nodes[NODE * top + 1] < 0 and top > 0:
        top -= 1
    # A step may look 255 places past the last node, and leaves look from a base of their own.
    nodes = _grown(nodes, NODE * (top + 257))
    for node in range(top + 1):
        if nodes[NODE * node] < 0:
            nodes[NODE * node] = 0
    return nodes


@inner
def exact(nodes: Int32, text: UInt8, start: int, stop: int) -> int:
    """The id of the key text[start:stop], or -1."""
    node = 0
    for at in range(start, stop):
        child = signed(nodes[NODE * node]) + text[at]
        if nodes[NODE * child + 1] != node:
            return -1
        node = child
    return signed(nodes[NODE * node + 2])


@inner
def starts_key(nodes: Int32, text: Bytes, start: int, stop: int) -> bool:
    """Whether some key is a prefix of text[start:stop]."""
    node = 0
    for at in range(start, stop):
        child = signed(nodes[NODE * node]) + text[at]
        if nodes[NODE * child + 1] != node:
            return False
        node = child
        if nodes[NODE * node + 2] >= 0:
            return True
    return False
