from __future__ import annotations

from kvstrata.cache.index import Node, PrefixIndex
from kvstrata.cache.keys import KeyChain


def chain_of(tokens: list[int], digest_bytes: int = 32) -> KeyChain:
    chain = KeyChain(b"root", 2, digest_bytes=digest_bytes)
    chain.extend(tokens)
    return chain


def insert(index: PrefixIndex, chain: KeyChain) -> list[Node]:
    nodes = [index.root]
    for number, (key, content) in enumerate(zip(chain.keys, chain.contents, strict=True)):
        node = index.child(nodes[-1], key, content)
        assert node is not None
        node.blocks[0] = number
        nodes.append(node)
    return nodes[1:]


def test_walk_follows_the_longest_known_prefix() -> None:
    index = PrefixIndex(b"root", 1)
    nodes = insert(index, chain_of([1, 2, 3, 4, 5, 6]))
    assert index.walk(chain_of([1, 2, 3, 4, 9, 9]), 3, 0.0) == nodes[:2]
    assert index.walk(chain_of([1, 2, 3, 4, 5, 6]), 1, 0.0) == nodes[:1]
    nodes[1].deadline = 5.0
    assert index.walk(chain_of([1, 2, 3, 4, 5, 6]), 3, 4.9) == nodes
    assert index.walk(chain_of([1, 2, 3, 4, 5, 6]), 3, 5.0) == nodes[:1]


def test_same_tokens_under_another_parent_are_other_content() -> None:
    index = PrefixIndex(b"root", 1)
    first, second = insert(index, chain_of([1, 2, 3, 4]))
    forged = chain_of([1, 2, 3, 4])
    forged.keys[1] = first.key  # as if both blocks had one key
    forged.contents[1] = first.content
    assert index.walk(forged, 2, 0.0) == [first]
    assert index.child(index.root, second.key, second.content) is None
    assert index.collisions == 2


def test_pruning_takes_out_what_leads_nowhere() -> None:
    index = PrefixIndex(b"root", 1)
    first, second = insert(index, chain_of([1, 2, 3, 4]))
    first.blocks[0] = -1
    index.prune(first)
    assert len(index) == 2, "it leads to the second"
    second.blocks[0] = -1
    index.prune(second)
    assert len(index) == 0
    assert not first.live
    assert not index.root.children


def test_subtree_has_parents_before_children() -> None:
    index = PrefixIndex(b"root", 1)
    first, second = insert(index, chain_of([1, 2, 3, 4]))
    third = insert(index, chain_of([1, 2, 5, 6]))[1]
    assert index.subtree(first) == [first, second, third]
