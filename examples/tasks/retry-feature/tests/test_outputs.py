USE = """
from calls import call, GaveUp
slept, tries = [], []
def fails(times, error=KeyError):
    def function():
        tries.append(1)
        if len(tries) <= times:
            raise error("oh no")
        return "done"
    return function
"""


def test_one_call(check):
    check(USE + "assert call(lambda: 7) == 7")


def test_tries_again(check):
    check(USE + "assert call(fails(2), attempts=3) == 'done' and len(tries) == 3")


def test_stops_when_it_works(check):
    check(USE + "assert call(fails(0), attempts=3) == 'done' and len(tries) == 1")


def test_gives_up(check):
    code = "try: call(fails(9), attempts=3)\nexcept GaveUp as e: "
    check(USE + code + "assert 'after 3 attempts' in str(e) and 'oh no' in str(e)\nelse: raise AssertionError")


def test_the_cause(check):
    code = "try: call(fails(9))\nexcept GaveUp as e: assert isinstance(e.__cause__, KeyError)\n"
    check(USE + code + "else: raise AssertionError")


def test_only_some_errors(check):
    code = "try: call(fails(9, OSError), attempts=3, only=(KeyError,))\nexcept OSError: assert len(tries) == 1\n"
    check(USE + code + "else: raise AssertionError")


def test_waits_in_between(check):
    check(USE + "call(fails(1), attempts=2, delay=3.0, sleep=slept.append); assert slept == [3.0]")


def test_waits_grow(check):
    code = "call(fails(4), attempts=5, delay=1.0, factor=3.0, max_delay=10.0, sleep=slept.append)"
    check(USE + code + "; assert slept == [1.0, 3.0, 9.0, 10.0]")


def test_refuses_no_attempts(check):
    check(USE + "try: call(fails(0), attempts=0)\nexcept ValueError: pass\nelse: raise AssertionError")
