"""KVCacheManager against a plain list of tensors, over random sequences of operations."""

from collections import Counter

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atb_modules.attention.cache import KVCacheManager, OutOfPagesError

MAX_LEN = 40
ROW = st.integers(0, 5)


def key_of(history):
    """One number a token that depends on the token and all before it: the keys of a deterministic model."""
    value = 0
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return float(value)


class CacheMachine(RuleBasedStateMachine):
    """The model: for every open row its token list. Layer l stores key_of(history) + l for every token."""

    @initialize(
        page_size=st.integers(1, 5),
        num_pages=st.integers(4, 30),
        windows=st.sampled_from([(None,), (6,), (None, 3), (0, None), (7, 2)]),
    )
    def build(self, page_size, num_pages, windows):
        self.page_size = page_size
        self.windows = windows
        self.num_pages = num_pages
        self.cache = KVCacheManager(
            MAX_LEN, page_size, len(windows), 1, 1, torch.float64, num_pages=num_pages, window=windows
        )
        for layer in range(len(windows)):
            for pages in self.cache.pages(layer):
                pages.fill_(float("nan"))
        self.rows = []
        self.known = set()

    def write(self, step, histories):
        values = [
            key_of(history[: past + i + 1])
            for history, past, count in zip(histories, step.past_lengths, step.query_lengths, strict=True)
            for i in range(count)
        ]
        for layer in range(len(self.windows)):
            k = torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1) + layer
            self.cache.append(step, layer, k, -k)

    def push(self, additions):
        """One step with these new tokens a row; returns whether there was room."""
        before = self.cache.memory_stats(), self.cache.lengths
        histories = [row + new for row, new in zip(self.rows, additions, strict=True)]
        if any(len(history) > MAX_LEN for history in histories):
            try:
                self.cache.step([len(new) for new in additions])
            except ValueError as error:
                assert "max_seq_len" in str(error)
            else:
                raise AssertionError("a row passed max_seq_len")
            assert before == (self.cache.memory_stats(), self.cache.lengths)
            return False
        try:
            step = self.cache.step([len(new) for new in additions])
        except OutOfPagesError as error:
            assert error.needed > error.available
            assert before == (self.cache.memory_stats(), self.cache.lengths)
            return False
        self.write(step, histories)
        self.rows = histories
        return True

    @rule(count=st.integers(0, 3))
    def begin(self, count):
        self.cache.begin(count)
        self.rows = [[] for _ in range(count)]

    @precondition(lambda self: len(self.rows) < 6)
    @rule()
    def join(self):
        assert self.cache.join() == [len(self.rows)]
        self.rows.append([])

    @precondition(lambda self: self.rows)
    @rule(row=ROW)
    def leave(self, row):
        row %= len(self.rows)
        self.cache.leave(row)
        del self.rows[row]

    @precondition(lambda self: self.rows and len(self.rows) < 6)
    @rule(row=ROW)
    def fork(self, row):
        row %= len(self.rows)
        assert self.cache.fork(row) == [len(self.rows)]
        self.rows.append(list(self.rows[row]))

    @precondition(lambda self: self.rows)
    @rule(order=st.lists(ROW, max_size=5))
    def reorder(self, order):
        order = [row % len(self.rows) for row in order]
        self.cache.reorder(order)
        self.rows = [list(self.rows[row]) for row in order]

    @rule(counts=st.lists(st.integers(0, 9), min_size=6, max_size=6), token=st.integers(0, 2))
    def append(self, counts, token):
        self.push([[token] * count for count in counts[: len(self.rows)]])

    @precondition(lambda self: self.rows)
    @rule(times=st.integers(1, 6), token=st.integers(0, 2))
    def decode(self, times, token):
        for _ in range(times):
            if not self.push([[token]] * len(self.rows)):
                return

    @precondition(lambda self: self.rows)
    @rule(counts=st.lists(st.integers(0, 9), min_size=6, max_size=6))
    def step_and_rollback(self, counts):
        try:
            step = self.cache.step(counts[: len(self.rows)])
        except (OutOfPagesError, ValueError):
            return
        self.write(step, [row + [9] * 9 for row in self.rows])
        self.cache.rollback(step)

    @precondition(lambda self: self.rows)
    @rule(row=ROW, keep=st.integers(0, MAX_LEN))
    def crop(self, row, keep):
        row %= len(self.rows)
        try:
            self.cache.crop(keep, row)
        except ValueError as error:
            assert "cannot go back" in str(error) and 0 < keep < len(self.rows[row])
            return
        self.rows[row] = self.rows[row][:keep]

    @precondition(lambda self: self.rows)
    @rule(row=ROW, salt=st.sampled_from([None, "a"]))
    def register(self, row, salt):
        row %= len(self.rows)
        self.cache.register_prefix(row, self.rows[row], salt=salt)
        self.known.add((tuple(self.rows[row]), salt))

    @precondition(lambda self: self.known and len(self.rows) < 6)
    @rule(data=st.data(), salt=st.sampled_from([None, "a"]), tail=st.lists(st.integers(0, 2), max_size=3))
    def join_known(self, data, salt, tail):
        tokens, _ = data.draw(st.sampled_from(sorted(self.known, key=repr)))
        prompt = [*tokens, *tail][:MAX_LEN]
        expected = self.cache.match_prefix(prompt, salt=salt)
        row, shared = self.cache.join_prefix(prompt, salt=salt)
        assert (row, shared) == (len(self.rows), expected)
        assert shared % self.page_size == 0
        # Only what was registered under the same salt may be found.
        assert shared == 0 or any(key == salt and list(t[:shared]) == prompt[:shared] for t, key in self.known)
        self.rows.append(prompt[:shared])

    @invariant()
    def contents_are_the_lists(self):
        assert self.cache.lengths == tuple(map(len, self.rows))
        for layer, window in enumerate(self.windows):
            for row, history in enumerate(self.rows):
                k, v = self.cache.gather(layer, row)
                expected = [key_of(history[: i + 1]) + layer for i in range(len(history))]
                held = k.flatten().tolist()
                assert held == expected[len(expected) - len(held) :]
                assert torch.equal(v, -k)
                assert len(held) >= (len(history) if window is None else min(window, len(history)))

    @invariant()
    def pages_add_up(self):
        stats = self.cache.memory_stats()
        for group in stats.groups:
            assert group.pages_used + group.pages_kept + group.pages_free == group.pages_total
            index = self.cache._layer_groups[group.layers[0]]
            book = self.cache._book.groups[index]
            holders = Counter(page for row in self.cache._book.rows for page in row.pages[index] if page >= 0)
            assert book.pool.refs == [holders[page] for page in range(self.num_pages)]
            assert set(book.pool.free).isdisjoint(book.pool.kept) and set(book.pool.kept) <= set(book.pool.node_of)
            assert set(book.pool.free).isdisjoint(book.pool.node_of)
            for page, node in book.pool.node_of.items():
                assert self.cache._book.prefixes.nodes[node].pages[index] == page
            for row, sequence in enumerate(self.cache._book.rows):
                assert len(sequence.pages[index]) == -(-sequence.length // self.page_size)
                table = book.table.view(len(self.rows))[row].tolist()
                assert table == sequence.pages[index] + [-1] * (len(table) - len(sequence.pages[index]))
            if group.window is None:
                need = sum(-(-len(row) // self.page_size) for row in self.rows)
                assert group.pages_used <= need


CacheMachine.TestCase.settings = settings(
    max_examples=2000,
    stateful_step_count=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
TestCacheMachine = CacheMachine.TestCase
