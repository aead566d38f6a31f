USE = "from rows import parse, dump\n"


def test_plain(check):
    check(USE + "assert parse('a,b\\nc,d') == [['a', 'b'], ['c', 'd']]")


def test_line_ends(check):
    check(USE + "assert parse('a,b\\r\\nc,\\r\\n') == [['a', 'b'], ['c', '']]")


def test_commas_in_quotes(check):
    check(USE + "assert parse('a,\"b,c\",d\\n') == [['a', 'b,c', 'd']]")


def test_quotes_in_quotes(check):
    check(USE + "assert parse('\"say \"\"hi\"\"\",x\\n') == [['say \"hi\"', 'x']]")


def test_line_ends_in_quotes(check):
    check(USE + "assert parse('\"a\\nb\",c\\n') == [['a\\nb', 'c']]")


def test_no_end(check):
    check(USE + "try: parse('a,\"b\\n')\nexcept ValueError: pass\nelse: raise AssertionError")


def test_dump_quotes_what_needs_it(check):
    check(USE + "assert dump([['a', 'b,c'], ['\"', 'd']]) == 'a,\"b,c\"\\n\"\"\"\",d\\n'")


def test_dump_ends_rows(check):
    check(USE + "assert dump([['a', 'b'], ['c', '']]) == 'a,b\\nc,\\n' and dump([]) == ''")
