USE = "from order import build_order as b\n"


def test_nothing(check):
    check(USE + "assert b({}) == []")


def test_after_what_it_needs(check):
    check(USE + "assert b({'roof': ['wall'], 'wall': ['floor'], 'floor': []}) == ['floor', 'wall', 'roof']")


def test_diamond(check):
    check(USE + "assert b({'a': ['b', 'c'], 'b': ['d'], 'c': ['d'], 'd': []}) == ['d', 'b', 'c', 'a']")


def test_ties_by_name(check):
    check(USE + "assert b({'z': [], 'm': ['y', 'x'], 'y': [], 'x': []}) == ['x', 'y', 'm', 'z']")


def test_without_an_entry(check):
    check(USE + "assert b({'a': ['b']}) == ['b', 'a']")


def test_cycle(check):
    code = "try: b({'a': ['b'], 'b': ['c'], 'c': ['b']})\n"
    check(USE + code + "except ValueError as e: assert 'cycle: b -> c -> b' in str(e)\nelse: raise AssertionError")


def test_cycle_of_one(check):
    code = "try: b({'a': ['a']})\nexcept ValueError as e: assert 'cycle: a -> a' in str(e)\n"
    check(USE + code + "else: raise AssertionError")


def test_long_chain(check):
    check(USE + "n = 100000; o = b({i: [i + 1] for i in range(n)}); assert o == list(range(n, -1, -1))")
