#!/bin/bash
set -e
cat > jobs.py <<'EOF'
"""python3 jobs.py LOG: how long each job took."""

import sys
from datetime import datetime

started, done = {}, []
for line in open(sys.argv[1]):
    if not line.strip() or line.startswith("#"):
        continue
    time, what, *pairs = line.split()
    fields = dict(pair.split("=", 1) for pair in pairs)
    at = datetime.fromisoformat(time)
    if what == "start":
        started[int(fields["job"])] = at
    elif int(fields["job"]) in started:
        seconds = (at - started.pop(int(fields["job"]))).total_seconds()
        done.append((int(fields["job"]), int(seconds), fields["status"]))
for job, seconds, status in sorted(done):
    print(f"{job} {seconds} {status}")
for job in sorted(started):
    print(f"{job} - open")
EOF
