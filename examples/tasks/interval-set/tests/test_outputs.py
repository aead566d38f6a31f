def test_adds_in_order(check):
    check("from intervals import IntervalSet as S; assert list(S([(5, 7), (1, 2)])) == [(1, 2), (5, 7)]")


def test_merges_what_overlaps(check):
    check("from intervals import IntervalSet as S; assert list(S([(1, 4), (3, 9), (20, 21)])) == [(1, 9), (20, 21)]")


def test_merges_what_touches(check):
    check("from intervals import IntervalSet as S; assert list(S([(1, 4), (4, 6)])) == [(1, 6)]")


def test_refuses_an_empty_interval(check):
    code = "from intervals import IntervalSet as S\ntry:\n    S().add(3, 3)\nexcept ValueError: pass\nelse: raise AssertionError"
    check(code)


def test_contains_is_half_open(check):
    check("from intervals import IntervalSet as S; s = S([(2, 4)]); assert [n in s for n in (1, 2, 3, 4)] == [0, 1, 1, 0]")


def test_len_counts_integers(check):
    check("from intervals import IntervalSet as S; assert len(S([(1, 4), (2, 6), (10, 12)])) == 7 and len(S()) == 0")


def test_remove_splits(check):
    check("from intervals import IntervalSet as S; s = S([(0, 10)]); s.remove(3, 5); assert list(s) == [(0, 3), (5, 10)]")


def test_remove_spans_several(check):
    code = "from intervals import IntervalSet as S; s = S([(0, 3), (5, 8), (9, 12)]); s.remove(2, 10)"
    check(code + "; assert list(s) == [(0, 2), (10, 12)]")


def test_intersection(check):
    code = "from intervals import IntervalSet as S; found = list(S([(0, 5), (8, 12)]) & S([(3, 9), (11, 20)]))"
    check(code + "; assert found == [(3, 5), (8, 9), (11, 12)]")


def test_intersection_changes_neither(check):
    code = "from intervals import IntervalSet as S; a, b = S([(0, 5)]), S([(3, 9)]); a & b"
    check(code + "; assert list(a) == [(0, 5)] and list(b) == [(3, 9)]")
