import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xorl_lab.engine.packing import pack

FEW_TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def content(rows) -> list[tuple[list[int], list[int], list[int]]]:
    return [(r.tokens.tolist(), r.positions.tolist(), r.parents.tolist()) for r in rows]


@settings(max_examples=40)
@given(FEW_TOKENS, st.integers(1, 30), st.booleans())
def test_every_sequence_is_in_one_row_token_by_token(sequences, max_row, share):
    found: list[int] = []
    for row in pack(sequences, max_row=max_row, share=share):
        for member, slots in zip(row.members, row.slots, strict=True):
            found.append(member)
            assert row.tokens[slots].tolist() == sequences[member]
            assert row.positions[slots].tolist() == list(range(len(sequences[member])))
    assert sorted(found) == list(range(len(sequences)))


@settings(max_examples=40)
@given(FEW_TOKENS, st.integers(1, 30), st.booleans())
def test_a_node_sees_its_own_past_and_nothing_else(sequences, max_row, share):
    for row in pack(sequences, max_row=max_row, share=share):
        mask = row.attention_mask()
        for slots in row.slots:
            for depth, node in enumerate(slots):
                assert np.flatnonzero(mask[node]).tolist() == sorted(slots[: depth + 1].tolist())


@settings(max_examples=40)
@given(FEW_TOKENS, st.integers(1, 30), st.booleans())
def test_rows_are_no_longer_than_allowed_unless_one_sequence_is(sequences, max_row, share):
    for row in pack(sequences, max_row=max_row, share=share):
        assert len(row.tokens) <= max_row or len(row.members) == 1


@settings(max_examples=40)
@given(FEW_TOKENS, st.integers(1, 30), st.booleans(), st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_the_order_of_the_sequences(sequences, max_row, share, random):
    shuffled = random.sample(sequences, len(sequences))
    assert content(pack(sequences, max_row=max_row, share=share)) == content(
        pack(shuffled, max_row=max_row, share=share)
    )


@settings(max_examples=40)
@given(FEW_TOKENS)
def test_each_distinct_prefix_is_computed_once(sequences):
    prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert sum(len(row.tokens) for row in pack(sequences)) == len(prefixes)


@settings(max_examples=40)
@given(FEW_TOKENS)
def test_without_sharing_every_token_has_a_node_of_its_own(sequences):
    rows = pack(sequences, share=False)
    assert sum(len(row.tokens) for row in rows) == sum(map(len, sequences))
    for row in rows:
        nodes = np.concatenate(row.slots)
        assert len(set(nodes.tolist())) == len(nodes)
