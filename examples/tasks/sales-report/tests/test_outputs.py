def rows(text):
    return [line.split(",") for line in text.splitlines()]


def test_it_runs(shell):
    shell("python3 report.py")


def test_head(shell):
    assert rows(shell("cat report.csv"))[0] == ["month", "region", "amount"]


def test_sorted(shell):
    found = [row[:2] for row in rows(shell("cat report.csv"))[1:]]
    assert len(found) > 2 and found == sorted(found)


def test_regions(shell):
    found = {row[1] for row in rows(shell("cat report.csv"))[1:]}
    assert found == {"north", "south"}


def test_amounts(shell):
    found = {tuple(row[:2]): float(row[2]) for row in rows(shell("cat report.csv"))[1:]}
    assert found[("2026-01", "south")] == 1203.25 and found[("2026-02", "south")] == 9.5


def test_two_decimals(shell):
    assert all(len(row[2].split(".")[1]) == 2 for row in rows(shell("cat report.csv"))[1:])


def test_errors(shell):
    assert shell("cat errors.txt").split() == ["5", "7", "9"]


def test_other_input(shell):
    new = "date,region,product,amount\\n2026-03-01,east,tea,0.10\\n2026-03-02,East,tea,0.20\\nx\\n"
    make = f"d=$(mktemp -d) && cp report.py $d && cd $d && printf '{new}' > sales.csv && python3 report.py && "
    assert shell(make + "cat report.csv errors.txt") == "month,region,amount\n2026-03,east,0.30\n4\n"
