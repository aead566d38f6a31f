def lines(shell, text):
    text = text.replace("\n", "\\n")
    return shell(f"f=$(mktemp) && printf '{text}' > $f && python3 jobs.py $f").splitlines()


S, E = "2026-03-01T10:00:00Z start job=1\n", "2026-03-01T10:00:07Z end job=1 status=ok\n"


def test_one_job(shell):
    assert lines(shell, S + E)[0] == "1 7 ok"


def test_comments(shell):
    assert lines(shell, "# hello there\n\n" + S + E)[0] == "1 7 ok"


def test_over_midnight(shell):
    log = "2026-03-01T23:59:58Z start job=20\n2026-03-02T00:01:03Z end job=20 status=failed\n"
    assert lines(shell, log)[0] == "20 65 failed"


def test_never_started(shell):
    assert lines(shell, E.replace("job=1", "job=5") + S + E)[0] == "1 7 ok"


def test_time_zones(shell):
    assert lines(shell, S + "2026-03-01T12:00:05+02:00 end job=1 status=ok\n")[0] == "1 5 ok"


def test_sorted_by_number(shell):
    log = "".join(S.replace("=1", f"={n}") + E.replace("=1", f"={n}") for n in (10, 9, 2))
    assert [line.split()[0] for line in lines(shell, log)][:3] == ["2", "9", "10"]


def test_open_jobs(shell):
    assert lines(shell, S.replace("=1", "=12") + S.replace("=1", "=3") + S + E)[:3] == ["1 7 ok", "3 - open", "12 - open"]


def test_total(shell):
    assert lines(shell, S + E)[-1] == "total 1 7"


def test_the_real_log(shell):
    found = shell("python3 jobs.py jobs.log").splitlines()
    assert found == ["17 9 ok", "18 6 failed", "20 5 ok", "19 - open", "total 3 20"]
