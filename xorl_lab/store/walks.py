"""Walking through rollouts in any order, each group unpacked once."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from xorl_lab.store.records import StoredRollout


def in_order(
    ids: Sequence[int], group_of: Mapping[int, int], unpack: Callable[[int], list[StoredRollout]]
) -> Iterator[StoredRollout]:
    """Rollouts in the order of their ids.

    Of each group that was begun, what is still to come waits in memory.

    Args:
        ids: of the rollouts; one may come several times.
        group_of: the group of each.
        unpack: all rollouts of a group.
    """
    last = {number: i for i, number in enumerate(ids)}
    waiting: dict[int, StoredRollout] = {}
    for i, number in enumerate(ids):
        if number not in waiting:
            waiting |= {r.id: r for r in unpack(group_of[number]) if r.id in last}
        yield waiting.pop(number) if last[number] == i else waiting[number]
