MAKE = "d=$(mktemp -d) && w=$PWD/words.py && cd $d && printf 'b a b\\nA c\\n' > one && printf 'c c' > two && "


def test_one_file(shell):
    assert shell(MAKE + "python3 $w one") == "5\n"


def test_several_files(shell):
    assert shell(MAKE + "python3 $w one two") == "5 one\n2 two\n7 total\n"


def test_lines(shell):
    assert shell(MAKE + "python3 $w --lines one") == "2\n"


def test_lines_of_several(shell):
    assert shell(MAKE + "python3 $w --lines one two") == "2 one\n1 two\n3 total\n"


def test_top(shell):
    assert shell(MAKE + "python3 $w --top 2 one two") == "3 c\n2 b\n"


def test_top_without_case(shell):
    assert shell(MAKE + "python3 $w --top 2 --ignore-case one") == "2 a\n2 b\n"


def test_standard_input(shell):
    assert shell("echo a b c | python3 words.py") == "3\n" and shell("echo a b | python3 words.py -") == "2\n"


def test_a_missing_file(shell):
    said = shell(MAKE + "{ python3 $w one gone two 2>err; echo code $?; cat err; }")
    assert said == "5 one\n2 two\n7 total\ncode 1\nwords: gone: No such file or directory\n"
