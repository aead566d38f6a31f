"""sales.csv -> report.csv: the amount of each month and region."""

totals = {}
for line in open("sales.csv"):
    date, region, product, amount = line.split(",")
    key = (date[:7], region)
    totals[key] = totals.get(key, 0) + float(amount)

with open("report.csv", "w") as out:
    for (month, region), amount in totals.items():
        out.write(f"{month},{region},{amount}\n")
