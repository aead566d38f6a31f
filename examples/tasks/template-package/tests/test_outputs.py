USE = "from minitemplate import Template as T, TemplateError\n"
FAILS = "try:\n    {call}\nexcept TemplateError as e: assert {word!r} in str(e)\nelse: raise AssertionError"


def test_plain_text(check):
    check(USE + "assert T('no braces {').render() == 'no braces {'")


def test_value(check):
    check(USE + "assert T('{{ a }}-{{b}}').render(a=1, b='x') == '1-x'")


def test_nested_value(check):
    check(USE + "assert T('{{ a.b.c }}').render(a={'b': {'c': 7}}) == '7'")


def test_unknown_name(check):
    check(USE + FAILS.format(call="T('{{ a.z }}').render(a={})", word="a.z"))


def test_filter(check):
    check(USE + "assert T('{{ a | upper }}').render(a='x') == 'X'")


def test_filters_in_order(check):
    check(USE + "assert T('[{{ a|trim | title }}]').render(a=' two words ') == '[Two Words]'")


def test_unknown_filter(check):
    check(USE + FAILS.format(call="T('{{ a | nope }}').render(a=1)", word="nope"))


def test_if(check):
    check(USE + "t = T('a{% if x %}b{% end %}c'); assert t.render(x=1) == 'abc' and t.render(x=0) == 'ac'")


def test_for(check):
    check(USE + "assert T('{% for n in ns %}<{{ n }}>{% end %}').render(ns=[1, 2]) == '<1><2>'")


def test_for_sees_other_values(check):
    code = "t = T('{% for n in ns %}{{ n.k }}{{ sep }}{% end %}')"
    check(USE + code + "; assert t.render(ns=[{'k': 'a'}, {'k': 'b'}], sep=';') == 'a;b;'")


def test_unknown_name_in_a_block(check):
    check(USE + FAILS.format(call="T('{% for n in gone %}{% end %}').render()", word="gone"))
