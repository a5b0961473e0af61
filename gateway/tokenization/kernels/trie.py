"""A trie of strings as one double array: a step is an addition, a load and a comparison.

A key is a row of labels: the bytes of a string, each plus one, or numbers that somebody gave to characters.
A node is one int64, from the lowest bit on: its label (16 bits), the id of the key that ends here plus one, 0
if none does (20), and its base (27). The child of node n by label c is node base(n) + c, if that one's label
is c: no two nodes have the same base. Node 0 is the root; what holds no node is 0.
Source: Aoe 1989, "An efficient digital search algorithm by using a double-array structure"; Darts.
"""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import Bytes, Int64, UInt8, signed, unsigned
from gateway.tokenization.kernels.jit import entry, inner
from gateway.tokenization.unsupported import UnsupportedError
from rose.batch import Int32

# What marks node 0 as taken, but as no child by any label.
_ROOT = 0xFFFF
LABEL, ID_AT, BASE_AT = 0xFFFF, 16, 36
ID = (1 << (BASE_AT - ID_AT)) - 1
MAX_IDS = ID
MAX_LABEL = _ROOT - 1


def build_trie(ids: dict[bytes, int]) -> Int64:
    """i64[m] of the keys' trie; ids are in [0, MAX_IDS). The empty key is left out."""
    keys = sorted(key for key in ids if key)
    labels = np.frombuffer(b"".join(keys), np.uint8).astype(np.int32) + 1
    return build_labelled(labels, [len(key) for key in keys], [ids[key] for key in keys], 256)


def build_labelled(labels: Int32, lengths: list[int], ids: list[int], largest: int) -> Int64:
    """i64[m] of the trie of distinct keys, one after the other in `labels`, in the order of their labels.

    labels: in [1, largest]. ids: in [0, MAX_IDS). largest: the largest label that is ever looked for, whether
    a key has it or not: a step reads the place where it would be.

    Raises:
        UnsupportedError: a label or an id is larger.
    """
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    if largest > MAX_LABEL or max(ids, default=0) >= MAX_IDS:
        raise UnsupportedError(f"more than {MAX_LABEL} kinds of characters or {MAX_IDS} tokens")
    nodes: Int64 = _build(labels, bounds, np.array(ids, np.int32), largest)
    return nodes


@inner
def _grown(nodes: Int64, size: int) -> Int64:
    larger = np.zeros(size, np.int64)
    for at in range(min(len(nodes), size)):
        larger[at] = nodes[at]
    return larger


@inner
def _place(nodes: Int64, is_base: Int64, children: Int64, count: int, free: int) -> int:
    """The first slot from `free` on for the first of `count` children that suits the others; -1: none."""
    slot = max(free, signed(children[0]) + 1)
    while slot + children[count - 1] < len(nodes):
        base = slot - children[0]
        if nodes[slot] == 0 and not is_base[base]:
            fits = True
            for index in range(1, count):
                if nodes[base + children[index]] != 0:
                    fits = False
                    break
            if fits:
                return slot
        slot += 1
    return -1


@inner
def _children(keys: tuple[Int32, Int64], span: tuple[int, int, int], children: Int64, starts: Int64) -> int:
    """Labels of a node's children, and where the keys of each begin, and end; gives how many there are.

    keys: labels and bounds. span: the node's first key, the end of its keys, and its depth.
    """
    (labels, bounds), (low, high, depth) = keys, span
    count, last = 0, -1
    for key in range(low, high):
        label = signed(labels[bounds[key] + depth])
        if label != last:
            children[count], starts[count], last = label, key, label
            count += 1
    starts[count] = high
    return count


@inner
def _wait(waiting: Int64, at: int, node: int, span: tuple[int, int, int]) -> None:
    waiting[at, 0], waiting[at, 1], waiting[at, 2], waiting[at, 3] = node, span[0], span[1], span[2]


@entry
def _build(labels: Int32, bounds: Int64, values: Int32, largest: int) -> Int64:
    """The double array of sorted, distinct keys, widest nodes of a level first come first placed."""
    nodes, is_base = np.zeros(4096, np.int64), np.zeros(4096, np.int64)
    nodes[0] = _ROOT
    # Nodes whose children are still to be placed: node, first key, end of keys, depth.
    waiting = np.empty((len(labels) + 2, 4), np.int64)
    _wait(waiting, 0, 0, (0, len(bounds) - 1, 0))
    head, tail, free = 0, 1, 1
    children, starts = np.empty(largest + 1, np.int64), np.empty(largest + 2, np.int64)
    while head < tail:
        node, low, high, depth = waiting[head, 0], waiting[head, 1], waiting[head, 2], waiting[head, 3]
        head += 1
        if low < high and bounds[low + 1] - bounds[low] == depth:
            nodes[node] |= (signed(values[low]) + 1) << ID_AT
            low += 1
        if low == high:
            continue
        count = _children((labels, bounds), (low, high, depth), children, starts)
        while free < len(nodes) and nodes[free] != 0:
            free += 1
        slot = _place(nodes, is_base, children, count, free)
        while slot < 0:
            nodes, is_base = _grown(nodes, 2 * len(nodes)), _grown(is_base, 2 * len(nodes))
            slot = _place(nodes, is_base, children, count, free)
        if slot - free > 16:  # a crowded stretch: later nodes do not try it again
            free += (slot - free) // 2
        base = slot - children[0]
        nodes[node] |= base << BASE_AT
        is_base[base] = 1
        for index in range(count):
            nodes[base + children[index]] = children[index]
            _wait(waiting, tail, base + children[index], (starts[index], starts[index + 1], depth + 1))
            tail += 1
    return _trimmed(nodes, largest)


@inner
def _trimmed(nodes: Int64, largest: int) -> Int64:
    """The nodes up to the last, and the places that a step may look at past it."""
    top = len(nodes) - 1
    while nodes[top] == 0 and top > 0:
        top -= 1
    return _grown(nodes, top + largest + 2)


@inner
def child_of(nodes: Int64, node: int, label: int) -> int:
    """What the node holds that `label` leads to from one that holds `node`; 0 if there is none.

    nodes[0] is what the root holds. A leaf's base is 0, which is no node's: nothing is found from there.
    """
    child = nodes[unsigned((node >> BASE_AT) + label)]
    return child if child & LABEL == label else 0


@inner
def id_of(node: int) -> int:
    """The id of the key that ends at a node that holds `node`, or -1."""
    return ((node >> ID_AT) & ID) - 1


@inner
def exact(nodes: Int64, text: UInt8, start: int, stop: int) -> int:
    """The id of the key text[start:stop], or -1."""
    node = nodes[0]
    for at in range(start, stop):
        node = child_of(nodes, node, signed(text[at]) + 1)
        if node == 0:
            return -1
    return id_of(node)


@inner
def starts_key(nodes: Int64, text: Bytes, start: int, stop: int) -> bool:
    """Whether some key is a prefix of text[start:stop]."""
    node = nodes[0]
    for at in range(start, stop):
        node = child_of(nodes, node, signed(text[at]) + 1)
        if node == 0:
            return False
        if id_of(node) >= 0:
            return True
    return False
