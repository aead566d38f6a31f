def rows(text):
    return [line.split("\t") for line in text.splitlines()]


def test_it_runs(shell):
    assert shell("sh totals.sh; cat totals.tsv") != ""


def test_ids_and_names(shell):
    found = {row[0]: row[1] for row in rows(shell("cat totals.tsv"))}
    assert found["3"] == "Ada Lovelace" and found["1"] == found["10"] == "Bo"


def test_totals(shell):
    found = {row[0]: row[2] for row in rows(shell("cat totals.tsv"))}
    assert (found["1"], found["10"], found["3"]) == ("4", "7", "42")


def test_without_orders(shell):
    assert ["2", "Cy", "0"] in rows(shell("cat totals.tsv"))


def test_order(shell):
    assert [row[0] for row in rows(shell("cat totals.tsv"))] == ["3", "10", "1", "2"]


def test_unknown(shell):
    assert shell("cat unknown.tsv") == "77\t9\n"


def test_other_input(shell):
    make = "d=$(mktemp -d) && cp totals.sh $d && cd $d && printf '10\\tA B\\n9\\tC\\n' > customers.tsv && "
    make += "printf '4\\t1\\n9\\t2\\n' > orders.tsv && sh totals.sh && cat totals.tsv unknown.tsv"
    assert shell(make) == "9\tC\t2\n10\tA B\t0\n4\t1\n"
