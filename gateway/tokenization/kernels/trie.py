"""A trie of byte strings as one double array: a step is an addition, a load and a comparison.

A node is one int64, from the lowest bit on: its byte (8 bits), whether it is one (1), the id of the key that
ends here plus one, 0 if none does (24), and its base (30). The child of node n by byte c is node base(n) + c,
if that one's byte is c: no two nodes have the same base. Node 0 is the root.
Source: Aoe 1989, "An efficient digital search algorithm by using a double-array structure"; Darts.
"""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import Bytes, Int64, UInt8, signed, unsigned
from gateway.tokenization.kernels.jit import entry, inner
from rose.batch import Int32

# What marks node 0 as taken, but as no child by any byte.
_ROOT = 0xFF
_LABEL, _IS_NODE, _ID_AT, _BASE_AT = 0x1FF, 0x100, 9, 33
_ID = (1 << (_BASE_AT - _ID_AT)) - 1
MAX_IDS = _ID


def build_trie(ids: dict[bytes, int]) -> Int64:
    """i64[m] of the keys' trie; ids are in [0, MAX_IDS). The empty key is left out."""
    keys = sorted(key for key in ids if key)
    bounds = np.zeros(len(keys) + 1, np.int64)
    np.cumsum([len(key) for key in keys], out=bounds[1:])
    values = np.array([ids[key] for key in keys], np.int32)
    text: Bytes = np.frombuffer(b"".join(keys) or b"\0", np.uint8)
    nodes: Int64 = _build(text, bounds, values)
    return nodes


@inner
def _grown(nodes: Int64, size: int) -> Int64:
    larger = np.zeros(size, np.int64)
    for at in range(min(len(nodes), size)):
        larger[at] = nodes[at]
    return larger


@entry
def _build(text: Bytes, bounds: Int64, values: Int32) -> Int64:
    """The double array of sorted, distinct keys, widest nodes of a level first come first placed."""
    nodes = np.zeros(4096, np.int64)
    is_base = np.zeros(4096, np.int64)
    nodes[0] = _ROOT
    # Nodes whose children are still to be placed: node, first key, end of keys, depth.
    waiting = np.empty((len(text) + 2, 4), np.int64)
    waiting[0, 0], waiting[0, 1], waiting[0, 2], waiting[0, 3] = 0, 0, len(bounds) - 1, 0
    head, tail = 0, 1
    children = np.empty(256, np.int64)
    starts = np.empty(257, np.int64)
    free = 1
    while head < tail:
        node, low, high, depth = waiting[head, 0], waiting[head, 1], waiting[head, 2], waiting[head, 3]
        head += 1
        if low < high and bounds[low + 1] - bounds[low] == depth:
            nodes[node] |= (signed(values[low]) + 1) << _ID_AT
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
        while free < len(nodes) and nodes[free] != 0:
            free += 1
        slot, misses = free, 0
        while True:
            base = slot - children[0]
            if slot + 256 >= len(nodes):
                nodes, is_base = _grown(nodes, 2 * len(nodes)), _grown(is_base, 2 * len(nodes))
            fits = base > 0 and nodes[slot] == 0 and is_base[base] == 0
            if fits:
                for index in range(1, count):
                    if nodes[base + children[index]] != 0:
                        fits = False
                        break
            if fits:
                break
            slot += 1
            misses += 1
        if misses > 16:  # a crowded stretch: later nodes do not try it again
            free += (slot - free) // 2
        nodes[node] |= base << _BASE_AT
        is_base[base] = 1
        for index in range(count):
            child = base + children[index]
            nodes[child] = _IS_NODE | children[index]
            waiting[tail, 0], waiting[tail, 1] = child, starts[index]
            waiting[tail, 2], waiting[tail, 3] = starts[index + 1], depth + 1
            tail += 1
    top = len(nodes) - 1
    while nodes[top] == 0 and top > 0:
        top -= 1
    return _grown(nodes, top + 257)  # a step may look 255 places past the last node


@inner
def child_of(nodes: Int64, node: int, byte: int) -> int:
    """What the node holds that `byte` leads to from one that holds `node`; 0 if there is none.

    nodes[0] is what the root holds. A leaf's base is 0, which is no node's: nothing is found from there.
    """
    child = nodes[unsigned((node >> _BASE_AT) + byte)]
    return child if child & _LABEL == _IS_NODE | byte else 0


@inner
def id_of(node: int) -> int:
    """The id of the key that ends at a node that holds `node`, or -1."""
    return ((node >> _ID_AT) & _ID) - 1


@inner
def exact(nodes: Int64, text: UInt8, start: int, stop: int) -> int:
    """The id of the key text[start:stop], or -1."""
    node = nodes[0]
    for at in range(start, stop):
        node = child_of(nodes, node, signed(text[at]))
        if node == 0:
            return -1
    return id_of(node)


@inner
def starts_key(nodes: Int64, text: Bytes, start: int, stop: int) -> bool:
    """Whether some key is a prefix of text[start:stop]."""
    node = nodes[0]
    for at in range(start, stop):
        node = child_of(nodes, node, signed(text[at]))
        if node == 0:
            return False
        if id_of(node) >= 0:
            return True
    return False
