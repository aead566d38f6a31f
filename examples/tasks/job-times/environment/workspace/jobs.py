"""python3 jobs.py LOG: how long each job took."""

import sys

started = {}
for line in open(sys.argv[1]):
    time, what, job = line.split()
    seconds = int(time[17:19])
    if what == "start":
        started[job] = seconds
    else:
        print(job, seconds - started[job])
