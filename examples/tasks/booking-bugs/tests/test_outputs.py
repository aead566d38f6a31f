USE = "from booking import *; from datetime import date; D = lambda n: date(2026, 1, n)\n"


def test_nights(check):
    check(USE + "assert nights(D(1), D(3)) == 2 and nights(D(1), D(2)) == 1")


def test_nights_over_a_month(check):
    check(USE + "assert nights(date(2026, 1, 31), date(2026, 2, 2)) == 2")


def test_arrival_on_the_day_of_departure(check):
    check(USE + "assert free([(D(1), D(3))], D(3), D(5)) and free([(D(5), D(8))], D(3), D(5))")


def test_a_real_overlap_is_seen(check):
    check(USE + "assert not free([(D(1), D(4))], D(3), D(5)) and not free([(D(1), D(9))], D(3), D(5))")


def test_next_free(check):
    check(USE + "assert next_free([(D(1), D(4)), (D(5), D(8))], D(2), 1) == D(4)")


def test_next_free_longer(check):
    check(USE + "assert next_free([(D(1), D(4)), (D(5), D(8))], D(2), 2) == D(8)")


def test_parse(check):
    check(USE + "assert parse('2026-01-31..2026-02-02') == (date(2026, 1, 31), date(2026, 2, 2))")


def test_parse_refuses_no_night(check):
    code = "for bad in ('2026-01-02..2026-01-02', '2026-01-03..2026-01-02'):\n    try: parse(bad)\n"
    check(USE + code + "    except ValueError: pass\n    else: raise AssertionError")
