"""What is told of the prefix index equals what can be found in it, whatever happens to it."""

import random

from perdure.api.prefix_key import page_key, root_key
from perdure.core.prefix import Node, PrefixIndex
from perdure.core.prefix_report import ANEW, PrefixReport

SIZE = 2


def told(report: PrefixReport, known: set[bytes]) -> None:
    """What a reader knows after the changes since."""
    while report.changes:
        name, is_there = report.changes.popleft()
        if name == ANEW:
            known.clear()
        elif is_there:
            known.add(name)
        else:
            known.discard(name)


def names(index: PrefixIndex) -> set[bytes]:
    """Of what hangs under the roots of now, found anew."""
    found: dict[Node, bytes] = {}
    left = list(index._nodes.values())
    while left:
        node = left.pop(0)
        if isinstance(node.parent, tuple):
            if node.parent[0] == index._begun_with:
                found[node] = page_key(root_key(node.parent[1]), node.key[1])
        elif node.parent in found:
            found[node] = page_key(found[node.parent], node.key[1])
        elif any(node.parent is other for other in left):
            left.append(node)
    return set(found.values())


def test_what_is_told_is_what_can_be_found() -> None:
    """Random lives of an index: publishing, reclaiming, clearing, other weights that keep or drop, and back."""
    num_met = {"held": 0, "cleared": 0, "kept": 0, "came back": 0}
    for seed in range(200):
        rng = random.Random(seed)
        index, known = PrefixIndex(SIZE), set[bytes]()
        index.report = PrefixReport()
        next_page = 0
        for _ in range(60):
            roll = rng.random()
            pages = [page for page in range(next_page) if page in index]
            if roll < 0.7:
                path: list[Node] = []
                tokens = [rng.randrange(2) for _ in range(8)]
                root = index.root(rng.choice((None, "a")))
                index.extend(path, root, tokens, len(tokens))
                first = len(path) * SIZE
                index.publish(path[-1] if path else root, tokens[first : first + SIZE], next_page)
                next_page += 1
            elif roll < 0.85 and pages:
                index.forget(rng.choice(pages))
            elif roll < 0.9:
                index.clear()
                num_met["cleared"] += bool(pages)
            else:
                epoch, keep = rng.randrange(3), rng.random() < 0.5
                index.take_weights(epoch, keep)
                num_met["kept"] += keep and bool(names(index))
                num_met["came back"] += not keep and bool(names(index))
            told(index.report, known)
            assert known == names(index), f"seed {seed}"
            num_met["held"] += len(known)
    assert all(num_met.values()), num_met
