def test_sections_and_keys(check):
    check("import ini; assert ini.parse('a = x\\n[s]\\nB=y z\\n') == {'': {'a': 'x'}, 's': {'b': 'y z'}}")


def test_comments_and_empty_lines(check):
    check("import ini; assert ini.parse('# no\\n\\n ; no\\n[s]\\n  k =  v  \\n') == {'': {}, 's': {'k': 'v'}}")


def test_a_section_twice(check):
    check("import ini; assert ini.parse('[s]\\na=x\\n[t]\\n[s]\\nb=y\\n')['s'] == {'a': 'x', 'b': 'y'}")


def test_types(check):
    code = "import ini; found = ini.parse('a=Yes\\nb=off\\nc=-12\\nd=1.5\\n')['']"
    check(code + "; assert found == {'a': True, 'b': False, 'c': -12, 'd': '1.5'} and found['a'] is True")


def test_quotes(check):
    check("""import ini; assert ini.parse('a="12"\\nb=\\' x \\'\\n')[''] == {'a': '12', 'b': ' x '}""")


def test_errors_name_the_line(check):
    code = "import ini\nfor bad in ('a=1\\n[s\\n', 'a=1\\nword\\n', 'a=1\\n=2\\n'):\n"
    check(code + "    try:\n        ini.parse(bad)\n    except ValueError as e: assert 'line 2' in str(e)\n    else: raise AssertionError")


def test_dump_writes_sections(check):
    check("import ini; assert ini.dump({'': {'a': 1}, 's': {'b': True}}).split() == 'a = 1 [s] b = yes'.split()")


def test_round_trip(check):
    code = "import ini; x = {'': {'a': '12', 'b': 12, 'c': 'yes', 'd': False}, 's': {'e': 'two words'}}"
    check(code + "; assert ini.parse(ini.dump(x)) == x")
