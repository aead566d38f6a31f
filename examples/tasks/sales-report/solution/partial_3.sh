#!/bin/bash
set -e
cat > report.py <<'EOF'
"""sales.csv -> report.csv and errors.txt: the amount of each month and region."""

import csv
from decimal import Decimal, InvalidOperation

totals, errors = {}, []
with open("sales.csv", newline="") as file:
    for number, row in enumerate(csv.reader(file), 1):
        if number == 1:
            continue
        try:
            date, region, product, amount = row
            value = Decimal(amount.replace(",", ""))
        except (ValueError, InvalidOperation):
            errors.append(number)
            continue
        key = (date[:7], region.strip().lower())
        totals[key] = totals.get(key, 0) + value

with open("report.csv", "w") as out:
    out.write("month,region,amount\n")
    for (month, region), amount in sorted(totals.items()):
        out.write(f"{month},{region},{amount:.2f}\n")
EOF
python3 report.py
